"""The errors users see: each says what is wrong, where, and what would be right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class MegaschedError(Exception):
    """Base of every error that megasched raises on purpose."""


class ConfigError(MegaschedError):
    """Flags, files or the HF config can't be used as given."""


class CheckpointError(MegaschedError):
    """A checkpoint or weight folder does not fit the model."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a schedule.

    Attributes:
        what: the fault in one sentence, e.g. ``TP 3 does not divide 4 attention heads``.
        module: path of the module it is about, e.g. ``model.layers.0.mlp``; empty for the whole model.
        source: ``file:line`` of the schedule call that asked for it; empty when nobody asked.
        remedy: what would be right.
    """

    what: str
    module: str = ""
    source: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        lines = [self.what]
        if self.module:
            lines.append(f"module: {self.module}")
        if self.source:
            lines.append(f"asked for at: {self.source}")
        if self.remedy:
            lines.append(f"remedy: {self.remedy}")
        return "\n    ".join(lines)


class ScheduleError(MegaschedError):
    """The schedule can't be built; carries every problem found, not only the first."""

    def __init__(self, problems: Sequence[Problem] | Problem) -> None:
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        count = len(self.problems)
        head = "the schedule has a problem" if count == 1 else f"the schedule has {count} problems"
        super().__init__(head + ":\n" + "\n".join(f"  - {problem}" for problem in self.problems))
