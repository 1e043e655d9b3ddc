"""Roles: what a module is in its block, in words that hold for every architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Cut = Literal["column", "row", "vocab"]

# Every role, and how a module in it is cut over TP by the default schedule (None: whole on every rank).
ROLES: Mapping[str, Cut | None] = {
    "embed.tokens": "vocab",
    "embed.positions": None,
    "qkv.q": "column",
    "qkv.k": "column",
    "qkv.v": "column",
    "qkv.packed": "column",
    "attn.out": "row",
    "mlp.gate": "column",
    "mlp.up": "column",
    "mlp.gate_up": "column",
    "mlp.down": "row",
    "norm": None,
    "head": "column",
    # leaves whose plan says how they are cut, but whose place in the block is not known by name
    "column": "column",
    "row": "row",
}


@dataclass(frozen=True)
class Roles:
    """What is known of one definition beyond what its modules show.

    Attributes:
        role: module path -> role.
        heads: module path -> heads in its output (projections to q, k, v), so that they are cut between heads.
        components: module path -> sizes of the projections packed into its output, e.g. ``(q, k, v)``.
        local_attributes: module path -> attributes that count heads or features of one rank; divided by TP.
            ``config.num_attention_heads`` names a field of the module's config, which is copied first.
    """

    role: Mapping[str, str] = field(default_factory=dict)
    heads: Mapping[str, int] = field(default_factory=dict)
    components: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    local_attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path, role in self.role.items():
            if role not in ROLES:
                raise ValueError(f"{path}: unknown role {role!r}; roles are {', '.join(ROLES)}")
