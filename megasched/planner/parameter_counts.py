"""How many numbers there are in the parameters of a stage, on one rank."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megasched.megatron.session import Session
    from megasched.megatron.stage import Stage


class ParameterCounts:
    """Of a session; what lies in one layer alone is summed up once."""

    def __init__(self, session: Session) -> None:
        plan, structure = session.plan, session.plan.structure
        assert structure is not None
        self.structure = structure
        trains = {name: p.requires_grad for name, p in session.replaced.named_parameters(remove_duplicate=False)}
        owners: dict[str, list[str]] = defaultdict(list)
        for name, canonical in plan.canonical.items():
            owners[canonical].append(name)
        self._layers = [[0, 0] for _ in range(structure.count)]
        self._others: list[tuple[set[str], int, bool]] = []  # paths of its modules, numbers, trained
        for canonical, names in owners.items():
            size = math.prod(plan.local_shape(plan.placements[canonical]))
            paths, trained = {name.rpartition(".")[0] for name in names}, trains[names[0]]
            layer = structure.index_of(next(iter(paths))) if len(paths) == 1 else None
            if layer is None:
                self._others.append((paths, size, trained))
            else:
                self._layers[layer][not trained] += size

    def held(self, stages: Sequence[Stage]) -> tuple[int, int]:
        """Numbers in the parameters of a rank that holds these stages: trained ones, and frozen ones. A tied one
        counts once in each stage that has it."""
        found = [0, 0]
        for stage in stages:
            for layer in self._layers[stage.start : stage.stop]:
                found[0] += layer[0]
                found[1] += layer[1]
            for paths, size, trained in self._others:
                if any(stage.holds(self.structure, path) for path in paths):
                    found[not trained] += size
        return found[0], found[1]
