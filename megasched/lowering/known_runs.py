"""Runs of one model on meta, kept for plans that would make them again.

Plans of several layouts ask the same things: a linear is cut alike over 2 ranks and over 8.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import nn

from megasched.lowering.flops import ForwardFlops, forward_flops
from megasched.lowering.given_positions import takes_counted_positions
from megasched.lowering.propagate import propagate
from megasched.lowering.replay import Rank
from megasched.lowering.sequence_run import plan_sequence
from megasched.lowering.size_check import columns_of_unproven_sizes
from megasched.roles import Cut
from megasched.trial.labels import Derived
from megasched.trial.meta_call import meta_copy, to_meta
from megasched.trial.sequence_plan import SequencePlan
from megasched.trial.structure import Structure


class KnownRuns:
    """Of one model that nobody changes, with one structure and the same inputs; nor is what was found changed."""

    def __init__(self) -> None:
        self._derived: dict[Hashable, Derived] = {}
        # Ranks -> plans, each with the answers of ``refuse_region`` on which it rests.
        self._sequences: dict[int, list[tuple[dict[str, str], SequencePlan]]] = {}
        self._counted: bool | None = None
        self._unproven: dict[Hashable, set[str]] = {}
        self._flops: dict[Hashable, ForwardFlops] = {}
        self._probe: nn.Module | None = None  # of the last run; that of any would do

    def propagate(self, model: nn.Module, inputs: Mapping[str, Any], asked: Mapping[str, Any]) -> Derived:
        """As ``propagate`` does.

        Args:
            model: the definition, replacements made.
            asked: the other arguments.
        """
        key = tuple((name, _frozen(value)) for name, value in asked.items() if not isinstance(value, Structure))
        if key not in self._derived:
            self._probe = meta_copy(model)
            self._derived[key] = propagate(self._probe, to_meta(dict(inputs)), **asked)
        return self._derived[key]

    def unproven_sizes(
        self,
        derived: Derived,
        rank: Rank,
        cuts: Mapping[str, Cut],
        counts: Mapping[str, tuple[str, ...]],
    ) -> set[str]:
        """As ``columns_of_unproven_sizes`` does, of what ``propagate`` found."""
        key = (id(derived), *(_frozen(value) for value in vars(rank).values()), _frozen(counts))
        if key not in self._unproven:
            assert self._probe is not None
            found = columns_of_unproven_sizes(self._probe, derived.calls, rank, cuts, counts)
            self._unproven[key] = found
        return self._unproven[key]

    def forward_flops(
        self, model: nn.Module, inputs: Mapping[str, torch.Tensor], structure: Structure | None
    ) -> ForwardFlops:
        """As ``forward_flops`` does, of the structure's layers."""
        layers = () if structure is None else tuple(structure.layer_paths())
        key = (layers, *((name, tensor.shape) for name, tensor in inputs.items()))
        if key not in self._flops:
            self._probe = self._probe or meta_copy(model)
            self._flops[key] = forward_flops(self._probe, inputs, layers)
        return self._flops[key]

    def plan_sequence(
        self, model: nn.Module, structure: Structure, size: int, refuse_region: Callable[[str], str]
    ) -> SequencePlan:
        """As ``plan_sequence`` does."""
        known = self._sequences.setdefault(size, [])
        for answers, found in known:
            if all(refuse_region(path) == answer for path, answer in answers.items()):
                return found
        answers = {}

        def ask(path: str) -> str:
            answers[path] = refuse_region(path)
            return answers[path]

        found = plan_sequence(model, structure, size, ask, self._takes_counted_positions)
        known.append((answers, found))
        return found

    def _takes_counted_positions(self, model: nn.Module) -> bool:
        if self._counted is None:
            self._counted = takes_counted_positions(model)
        return self._counted


def _frozen(value: Any) -> Hashable:
    """Something equal for equal arguments, in their order."""
    return tuple(value.items()) if isinstance(value, Mapping) else value
