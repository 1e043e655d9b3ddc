"""Finds the column linears that read the same activation, and where it enters TP once for all of them.

It uses the calls of one labelled run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megasched.analysis.tp.facts import Region

if TYPE_CHECKING:
    from megasched.analysis.stages.layer_stack import LayerStack


@dataclass
class ColumnCall:
    """Describes one call of a column linear.

    Attributes:
        source: id of its input, by ``LabelRun.origin``.
        around: the calls around it, outermost first: path, and the id of each tensor argument, by
            ``LabelRun.origin``.
    """

    path: str
    source: int
    around: list[tuple[str, Mapping[int | str, int]]]


def find_entries(
    calls: Iterable[ColumnCall],
    other_uses: Mapping[int, Container[str]],
    cuts: Container[str],
    structure: LayerStack | None,
) -> dict[str, Region]:
    """Returns, by module path, the arguments and the columns inside that read them.

    The module is the outermost one below the layer that gets the very tensor its columns read (in one argument or,
    as query, key and value, in several), and that uses it in no other way.

    Args:
        calls: calls of column linears.
        other_uses: id of a tensor -> paths of modules that use it in another way, or return it.
        cuts: paths that are cut.
        structure: where the layers are, if that is known.
    """
    places: dict[str, set[tuple[str, tuple[int | str, ...]] | None]] = {}
    for call in calls:
        entry = _entry(call, other_uses.get(call.source, ()), cuts, structure)
        places.setdefault(call.path, set()).add(entry)
    found: dict[str, Region] = {}
    for column, entries in places.items():
        entry = next(iter(entries))
        if entry is None or len(entries) > 1:  # called in several ways: it reduces its gradient itself
            continue
        path, slots = entry
        known = found.get(path, Region(slots, ()))
        if known.slots == slots:
            found[path] = Region(slots, (*known.columns, column))
    return found


def columns_that_share(calls: Iterable[ColumnCall]) -> list[tuple[str, ...]]:
    """Returns groups of columns in one module that read the same tensor, in the order of their calls."""
    calls = list(calls)
    counts = Counter(call.path for call in calls)
    found: dict[tuple[int, str], list[str]] = defaultdict(list)
    for call in calls:
        if counts[call.path] == 1:
            found[call.source, call.path.rpartition(".")[0]].append(call.path)
    return [tuple(paths) for paths in found.values() if len(paths) > 1]


def _entry(
    call: ColumnCall, used_in: Container[str], cuts: Container[str], structure: LayerStack | None
) -> tuple[str, tuple[int | str, ...]] | None:
    for path, arguments in call.around:
        slots = tuple(key for key, tensor in arguments.items() if tensor == call.source)
        below = bool(path) if structure is None else structure.is_below_layer(path)
        if slots and below and path not in cuts and path not in used_in:
            return path, slots
    return None
