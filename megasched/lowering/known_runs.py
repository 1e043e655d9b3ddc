"""Runs of one model on meta, kept for plans that would make them again.

Plans of several layouts ask the same things: a linear is cut alike over 2 ranks and over 8.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from torch import nn

from megasched.lowering.given_positions import takes_counted_positions
from megasched.lowering.propagate import propagate
from megasched.lowering.sequence_run import plan_sequence
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

    def propagate(self, model: nn.Module, inputs: Mapping[str, Any], asked: Mapping[str, Any]) -> Derived:
        """As ``propagate`` does.

        Args:
            model: the definition, replacements made.
            asked: the other arguments.
        """
        key = tuple((name, _frozen(value)) for name, value in asked.items() if not isinstance(value, Structure))
        if key not in self._derived:
            self._derived[key] = propagate(meta_copy(model), to_meta(dict(inputs)), **asked)
        return self._derived[key]

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
