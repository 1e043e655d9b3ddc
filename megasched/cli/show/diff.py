"""Compares two schedules of a model for ``megasched show --diff``, and prints the differences."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.text import Text

from megasched.cli.page.compare import StepComparison, print_comparison
from megasched.cli.show.communication import Transfer
from megasched.cli.show.modules import CUT, ModuleReport, ParameterReport
from megasched.cli.show.report import ShowReport
from megasched.plan.decisions import fold_indices

_INDEX = re.compile(r"\.(\d+)(?=\.|$)")


@dataclass(frozen=True)
class Change:
    """Represents one difference between two schedules, with layers folded.

    Attributes:
        paths: modules that the schedules treat in different ways, e.g. ``model.layers.0-3.mlp``; or a stage.
        what: the aspect in which they differ.
        first, second: what each schedule does.
    """

    paths: str
    what: str
    first: str
    second: str


@dataclass(frozen=True)
class ShowDiff:
    """Holds the differences between two schedules of one model at one layout.

    Attributes:
        first, second: the names of the schedules, as given.
        calls_of_first, calls_of_second: calls that only one schedule makes, layers folded.
        changes: modules with different results.
        stages: pipeline stages with different layers, and the layers of each schedule.
        steps: the figures of a step of each; None where no step was predicted.
    """

    first: str
    second: str
    calls_of_first: tuple[str, ...]
    calls_of_second: tuple[str, ...]
    changes: tuple[Change, ...]
    stages: tuple[Change, ...]
    steps: StepComparison | None = None

    @property
    def same(self) -> bool:
        """Returns whether both schedules do the same to every module, even if their calls differ."""
        return not self.changes and not self.stages

    def to_dict(self) -> dict[str, Any]:
        """Returns the differences as plain data for JSON."""
        steps = self.steps and self.steps.to_dict()
        return {"same": self.same, **asdict(replace(self, steps=None)), "steps": steps}


def compare_reports(first: ShowReport, second: ShowReport) -> ShowDiff:
    """Returns how the second schedule differs from the first; both are of the same model at the same layout."""
    calls = [[(record.path, str(record)) for record in report.records] for report in (first, second)]
    return ShowDiff(
        first.schedule,
        second.schedule,
        _folded_calls(calls[0], set(calls[1])),
        _folded_calls(calls[1], set(calls[0])),
        _changes(first.modules, second.modules),
        _stage_changes(first, second),
    )


def _changes(first: Iterable[ModuleReport], second: Iterable[ModuleReport]) -> tuple[Change, ...]:
    one, other = ({module.path: _aspects(module) for module in modules} for modules in (first, second))
    found: dict[tuple[str, str, str, str], list[str]] = {}
    for path in dict.fromkeys([*one, *other]):
        mine, theirs = one.get(path, {}), other.get(path, {})
        for what in dict.fromkeys([*mine, *theirs]):
            before, after = mine.get(what, ""), theirs.get(what, "")
            if before != after:
                found.setdefault((_pattern(path), what, before, after), []).append(path)
    return tuple(Change(_folded(paths), *key[1:]) for key, paths in found.items())


def _aspects(module: ModuleReport) -> dict[str, str]:
    """Returns what is done to a module, as aspect -> words; aspects without any effect are left out."""
    found = {
        "runs as": module.becomes,
        "sends": "; ".join(_sent(transfer) for transfer in module.transfers),
        "recompute": "yes" if module.recompute else "",
        "notes": "; ".join(module.notes),
        **{f"{parameter.name} on a rank": _lies(parameter) for parameter in module.parameters},
    }
    return {what: words for what, words in found.items() if words}


def _sent(transfer: Transfer) -> str:
    shared = f" for {', '.join(transfer.shared_by)}" if transfer.shared_by else ""
    return f"{transfer.op} of the {transfer.tensor}, {transfer.phase}{shared}"


def _lies(parameter: ParameterReport) -> str:
    partial = ", gradient summed over TP" if parameter.partial_gradient else ""
    packed = f", parts {'+'.join(map(str, parameter.components))}" if parameter.components else ""
    return f"{list(parameter.local_shape)}{packed}{partial}"


def _stage_changes(first: ShowReport, second: ShowReport) -> tuple[Change, ...]:
    found = []
    for one, other in zip(first.stages, second.stages, strict=True):
        if (one.start, one.stop) != (other.start, other.stop):
            layers = (f"{stage.start}-{stage.stop - 1}" for stage in (one, other))
            found.append(Change(f"stage {one.stage}", "layers", *layers))
    return tuple(found)


def _folded_calls(calls: Iterable[tuple[str, str]], others: set[tuple[str, str]]) -> tuple[str, ...]:
    """Returns the calls that are not among the others, folding those that differ only in their layer."""
    groups: dict[tuple[str, str], list[str]] = {}
    for path, call in calls:
        if (path, call) not in others:
            asked = call.partition(": ")[2]
            key = path if asked.startswith(CUT) else _pattern(path)
            groups.setdefault((key, asked), []).append(path)
    return tuple(f"{_folded(paths) or '<model>'}: {asked}" for (_, asked), paths in groups.items())


def _pattern(path: str) -> str:
    return _INDEX.sub(".*", path, count=1)


def _folded(paths: list[str]) -> str:
    """Returns paths that differ only in their first index as one path: ``model.layers.0-3.mlp``."""
    indices = [int(found[1]) for path in paths if (found := _INDEX.search(path))]
    if len(paths) == 1 or len(indices) != len(paths):
        return paths[0]
    return _INDEX.sub(f".{fold_indices(sorted(set(indices)))}", paths[0], count=1)


def print_diff(diff: ShowDiff, console: Console) -> None:
    """Prints what the two schedules do differently, as ``-`` and ``+`` lines, laid out for 100 columns."""
    console.print(Text.assemble(("- ", "red"), diff.first, "\n", ("+ ", "green"), diff.second))
    if diff.calls_of_first or diff.calls_of_second:
        console.print(Text("\ncalls that only one makes", "bold"))
    for call in diff.calls_of_first:
        console.print(Text(f"  - {call}", "red"))
    for call in diff.calls_of_second:
        console.print(Text(f"  + {call}", "green"))
    if diff.changes:
        console.print(Text("\nmodules that come out otherwise", "bold"))
    for change in diff.changes:
        console.print(_change(change))
    if diff.stages:
        console.print(Text("\npipeline stages", "bold"))
    for change in diff.stages:
        console.print(_change(change))
    if diff.same:
        console.print("\nboth do the same to every module")
    if diff.steps is not None:
        console.print()
        print_comparison(diff.steps, console)


def _change(change: Change) -> Text:
    text = Text.assemble(f"  {change.paths}  ", (change.what, "dim"))
    for sign, words, colour in (("-", change.first, "red"), ("+", change.second, "green")):
        text.append(f"\n    {sign} {words or 'nothing'}", colour)
    return text
