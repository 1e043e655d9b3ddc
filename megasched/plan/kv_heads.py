"""Fewer heads of k and v than TP ranks: the projection stays whole, and each rank uses the head it needs.

Each rank computes the head that its query heads attend to, so the gradient of the whole is the sum over TP
(the placement says ``partial``). Megatron's own rule for ``num_query_groups < TP`` is the same head to rank
assignment (megatron/core/transformer/attention.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from megasched.errors import Problem
from megasched.language.schedule import Schedule


@dataclass(frozen=True)
class ReplicatedHeads:
    """Which output rows of a projection a rank uses, where TP exceeds the heads of k and v.

    Attributes:
        heads: of k, and of v.
        components: sizes of q, k and v where they are packed into one projection; empty for k or v alone.
    """

    heads: int
    components: tuple[int, ...] = ()

    @property
    def of_components(self) -> tuple[int, ...]:
        """Heads of each component that ranks have several times; 0 for q, of which each has a part of its own."""
        return (0, self.heads, self.heads) if self.components else (self.heads,)

    def rows(self, rank: int, size: int, features: int) -> list[tuple[int, int]]:
        """Half-open ranges of output rows for TP rank ``rank`` of ``size``: its part of q, one head of k and v.

        Args:
            features: output rows of the whole projection.
        """
        sizes = self.components or (features,)
        starts = [0, *accumulate(sizes)]
        found = []
        for index, (start, length) in enumerate(zip(starts, sizes, strict=False)):
            queries = bool(self.components) and index == 0
            width = length // size if queries else length // self.heads
            place = rank if queries else rank * self.heads // size
            found.append((start + place * width, start + (place + 1) * width))
        return found


def find_replicated_heads(
    schedule: Schedule, path: str, components: tuple[int, ...]
) -> ReplicatedHeads | Problem | None:
    """How the heads of a projection to k or v are replicated; None where TP divides them; a problem otherwise."""
    tp, role, heads = schedule.layout.tp, schedule.role_of(path), schedule.roles.heads.get(path)
    if heads is None or heads % tp == 0:
        return None
    # Heads of an inferred column are told where it was seen that they can be replicated.
    packed = role in ("qkv.packed", "column") and len(components) == 3
    if heads < tp and tp % heads == 0 and (role in ("qkv.k", "qkv.v", "column") or packed):
        uneven = _uneven_queries(components, heads, tp)
        return uneven or ReplicatedHeads(heads, components)
    what = f"TP {tp} does not divide {heads} heads of {role}"
    remedy = f"a tensor parallel size that divides {heads}"
    if role in ("qkv.k", "qkv.v") or packed:
        remedy += ", or that is a multiple of it (heads are replicated)"
    return Problem(what, path, remedy=remedy)


def _uneven_queries(components: tuple[int, ...], heads: int, tp: int) -> Problem | None:
    """The query heads that are packed with k and v must still divide."""
    if not components:
        return None
    queries = components[0] // (components[1] // heads)
    if queries % tp == 0:
        return None
    return Problem(
        f"TP {tp} does not divide {queries} query heads", remedy=f"a tensor parallel size that divides {queries}"
    )
