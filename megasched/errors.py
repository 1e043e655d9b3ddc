"""Defines the errors users see: each says what is wrong, where, and what would be right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd


class MegaschedError(Exception):
    """Serves as the base of every error that megasched raises on purpose."""


class ConfigError(MegaschedError):
    """Reports that flags, files or the HF config can't be used as given."""


class CheckpointError(MegaschedError):
    """Reports that a checkpoint or weight folder does not fit the model."""


@dataclass(frozen=True)
class Problem:
    """Describes one thing that is wrong with a schedule.

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
        return describe(self, [self.module] if self.module else [])


@dataclass(frozen=True)
class Indivisible(Problem):
    """Describes a size that a parallel size does not divide; several of a schedule have one cause.

    Attributes:
        divisor: the parallel size, e.g. ``TP 3``.
        whole: what it is to cut, e.g. ``4 heads of qkv.q``.
        size: the number in it.
    """

    divisor: str = ""
    whole: str = ""
    size: int = 1


def indivisible(
    divisor: str, whole: str, size: int, *, module: str = "", source: str = "", remedy: str = ""
) -> Indivisible:
    """Returns the problem; its remedy is a parallel size that divides, if none is given."""
    remedy = remedy or f"{PARALLEL_SIZES[divisor.split()[0]]} that divides {size}"
    return Indivisible(f"{divisor} does not divide {whole}", module, source, remedy, divisor, whole, size)


@dataclass(frozen=True)
class Declined:
    """Describes a requested or possible change that is not made, which is no fault.

    Attributes:
        reason: why, in words that can follow a colon.
        path: path of the module that it is about.
        source: ``file:line`` of the schedule call that asked for it; empty when nobody asked.
    """

    reason: str
    path: str = ""
    source: str = ""

    def __str__(self) -> str:
        return self.reason


# What a user may change, by the name of a group of ranks.
PARALLEL_SIZES = {"TP": "a tensor parallel size", "EP": "an expert parallel size"}
# Of modules with one and the same problem, so many are named; equal layers have equal faults.
NAMED_MODULES = 3


def did_you_mean(close: Sequence[str]) -> str:
    """Returns the end of a message that names what is spelled alike; empty where nothing is."""
    return f"; did you mean {' or '.join(close)}?" if close else ""


def some_of(names: Sequence[str]) -> str:
    """Returns the first names as text, with the number of names left out."""
    more = f" and {len(names) - NAMED_MODULES} more" if len(names) > NAMED_MODULES else ""
    return f"{', '.join(names[:NAMED_MODULES])}{more}"


def describe(problem: Problem, modules: Sequence[str]) -> str:
    """Returns a problem that several modules share, as lines of text."""
    lines = [problem.what]
    if modules:
        title = "module" if len(modules) == 1 else "modules"
        lines.append(f"{title}: {some_of(modules)}")
    if problem.source:
        lines.append(f"asked for at: {problem.source}")
    if problem.remedy:
        lines.append(f"remedy: {problem.remedy}")
    return "\n    ".join(lines)


def _describe_indivisible(problems: Sequence[tuple[Indivisible, Sequence[str]]]) -> str:
    """Returns sizes that one parallel size does not divide, as lines of text, with a size that divides all."""
    divisor, sources = problems[0][0].divisor, {problem.source for problem, _ in problems}
    others = "another size" if len(problems) == 2 else f"{len(problems) - 1} other sizes"
    lines = [f"{problems[0][0].what} and {others}"]
    for problem, modules in problems:
        asked = f" (asked for at: {problem.source})" if len(sources) > 1 and problem.source else ""
        lines.append(f"  {problem.whole}: {some_of(modules)}{asked}")
    if len(sources) == 1 and problems[0][0].source:
        lines.append(f"asked for at: {problems[0][0].source}")
    most = gcd(*(problem.size for problem, _ in problems))
    right = ", ".join(str(size) for size in range(1, most + 1) if most % size == 0)
    lines.append(f"remedy: {PARALLEL_SIZES[divisor.split()[0]]} that divides all of them: {right}")
    return "\n    ".join(lines)


class ScheduleError(MegaschedError):
    """Reports that the schedule can't be built; carries every problem found, not only the first."""

    def __init__(self, problems: Sequence[Problem] | Problem) -> None:
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        alike: dict[Problem, list[str]] = {}
        for problem in self.problems:
            modules = alike.setdefault(replace(problem, module=""), [])
            modules += [problem.module] if problem.module else []
        cut: dict[str, list[tuple[Indivisible, list[str]]]] = {}
        for problem, modules in alike.items():
            if isinstance(problem, Indivisible):
                cut.setdefault(problem.divisor, []).append((problem, modules))
        texts: dict[str, None] = {}  # in their order, and each once
        for problem, modules in alike.items():
            same = cut.get(problem.divisor, []) if isinstance(problem, Indivisible) else []
            texts[_describe_indivisible(same) if len(same) > 1 else describe(problem, modules)] = None
        head = "the schedule has a problem" if len(texts) == 1 else f"the schedule has {len(texts)} problems"
        lines = [f"  - {text}" for text in texts]
        super().__init__("\n".join([f"{head}:", *lines]))

    def __reduce__(self) -> tuple[type[ScheduleError], tuple[list[Problem]]]:
        return type(self), (self.problems,)  # from another process it comes as it was raised there
