"""Follows the replacements that a schedule asks for, so that what they bring in can be called on, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from megasched.language.records import Record
from megasched.language.registry import Node, get_primitive
from megasched.language.signatures import takes

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ReplacedNames:
    """Holds what the replacements of a run have made of the names of a definition.

    Attributes:
        renamed: parameter or buffer with another name now -> its first name in the definition.
        moved: path of a module of the definition -> path where it stands now, inside of one that replaced it.
        heirs: path of a module that is gone -> path of the one that has its parameters, under their names.
        saved_as: as ``renamed``, of what a state dict has; each name of a tied parameter -> another of its names.
        lost: first names of the definition's parameters that no module has any more.
        lost_buffers: its persistent buffers that no module has any more.
        made: parameters and persistent buffers that are none of the definition's, as of a function in ``weights``.
    """

    renamed: Mapping[str, str] = field(default_factory=dict)
    moved: Mapping[str, str] = field(default_factory=dict)
    heirs: Mapping[str, str] = field(default_factory=dict)
    saved_as: Mapping[str, str] = field(default_factory=dict)
    lost: frozenset[str] = frozenset()
    lost_buffers: frozenset[str] = frozenset()
    made: frozenset[str] = frozenset()

    def home(self, path: str) -> str:
        """Returns where the weights of a module of the definition are now; its own path if they did not move."""
        return self.moved.get(path) or self.heirs.get(path, path)


class ReplacedModel(Protocol):
    """Describes the trial of ``analysis/trials/replacements.py``, which makes replacements on a copy on meta."""

    modules: Mapping[str, nn.Module]
    first_path: Mapping[int, str]
    failed: Mapping[str, str]

    def replace(self, record: Record, path: str) -> None: ...


_MAKE_TRIAL: list[Callable[[Any], ReplacedModel]] = []


def register_replacement_trial(make: Callable[[Any], ReplacedModel]) -> None:
    """Registers the class that tries replacements of a model."""
    _MAKE_TRIAL[:] = [make]


def replacements(records: Sequence[Record], root: Node) -> Iterator[tuple[Record, str]]:
    """Yields each record by which another module replaces one, with that one's path, in the order of the calls."""
    for record in records:
        primitive = get_primitive(record.primitive)
        if not primitive.replaces_modules or "subgraph" in record.arguments:
            continue
        if record.path in root:
            yield from ((record, path) for path in primitive.paths(root[record.path], record.arguments))
        else:  # another replacement has taken it away, which is refused where it is to be made
            yield record, record.path


def call_factory(record: Record, path: str, old: nn.Module) -> Any:
    """Returns what the factory of a replacement makes of a module; an instance is itself.

    Args:
        path: of the module in the definition; a factory of Slapo's form is given the part below the record's.
    """
    factory = record.arguments["factory"]
    if hasattr(factory, "named_modules") and not isinstance(factory, type):
        return factory
    if takes(factory, 1):
        return factory(old)
    return factory(path.removeprefix(record.path).removeprefix("."), old)


class Replacements:
    """Holds the trial of the replacements that a growing list of records asks for.

    Attributes:
        last: the trial of those that were looked at last; None without any.
    """

    def __init__(self) -> None:
        self.last: ReplacedModel | None = None
        self._tried: list[Record] = []

    def trial(self, records: Sequence[Record], root: Node) -> ReplacedModel | None:
        """Returns the trial with the replacements of all records; None where there are none."""
        if len(records) < len(self._tried):
            self.last, self._tried = None, []
        new = records[len(self._tried) :]
        self._tried += new
        for record, path in replacements(new, root):
            if self.last is None:
                self.last = _MAKE_TRIAL[0](root.mod)
            self.last.replace(record, path)
        return self.last
