"""Defines what each rank of a pipeline does when, predicted by the planner or recorded from a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["forward", "backward", "communication", "optimizer"]


@dataclass(frozen=True)
class Span:
    """Describes one piece of work of one rank.

    Attributes:
        rank: pipeline rank where it is predicted, global rank where it is recorded.
        microbatch: index of the micro-batch in the step, from 0; None for work of the whole step.
        chunk: index of the model chunk on the rank (VPP), from 0; None for work of the whole rank.
        start, end: in seconds from the beginning of the step.
        name: label in a viewer, where the kind does not say all.
    """

    rank: int
    kind: Kind
    microbatch: int | None
    chunk: int | None
    start: float
    end: float
    name: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start
