"""Counts the numbers in the parameters of a stage, on one rank."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megasched.trainer.session import Session
    from megasched.trainer.stages.stage import Stage


@dataclass(frozen=True)
class Count:
    """Holds how many numbers there are in parameters.

    Attributes:
        dense, experts: trained numbers; those of experts that are sharded over EP are apart.
        frozen: numbers that are not trained.
        quantized: numbers among all these that have copies in 8 bits.
    """

    dense: int = 0
    experts: int = 0
    frozen: int = 0
    quantized: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(
            self.dense + other.dense,
            self.experts + other.experts,
            self.frozen + other.frozen,
            self.quantized + other.quantized,
        )

    @property
    def trained(self) -> int:
        return self.dense + self.experts


class ParameterCounts:
    """Counts the parameters of a session; sums up once what lies in one layer alone."""

    def __init__(self, session: Session) -> None:
        plan, structure = session.plan, session.plan.stack
        self.structure = structure
        trains = {name: p.requires_grad for name, p in session.replaced.named_parameters(remove_duplicate=False)}
        owners: dict[str, list[str]] = defaultdict(list)
        for name, canonical in plan.canonical.items():
            owners[canonical].append(name)
        self._layers = [Count()] * structure.count
        self._others: list[tuple[set[str], Count]] = []  # with the paths of its modules
        for canonical, names in owners.items():
            placement = plan.placements[canonical]
            size = math.prod(plan.local_shape(placement))
            kind = "frozen" if not trains[names[0]] else "experts" if placement.group == "ep" else "dense"
            quantized = size if canonical in plan.weights_in_8_bits else 0
            paths, count = {name.rpartition(".")[0] for name in names}, Count(**{kind: size}, quantized=quantized)
            layer = structure.index_of(next(iter(paths))) if len(paths) == 1 else None
            if layer is None:
                self._others.append((paths, count))
            else:
                self._layers[layer] += count

    def held(self, stages: Sequence[Stage]) -> Count:
        """Returns the count of a rank that holds these stages; a tied parameter counts in each that has it."""
        found = Count()
        for stage in stages:
            found = sum(self._layers[stage.start : stage.stop], found)
            for paths, count in self._others:
                if any(stage.holds(self.structure, path) for path in paths):
                    found += count
        return found
