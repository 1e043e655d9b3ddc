"""A part of a traced module, named so that a record can keep it: plain data, no tensors and no nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megasched.errors import Problem, ScheduleError
from megasched.language.records import caller_source


@dataclass(frozen=True)
class Subgraph:
    """Operations of one traced module.

    Attributes:
        path: the traced module.
        nodes: names of the operations, in the order in which they run.
        inputs: names of what they read from outside, in the order of the pattern's parameters; of the
            operations otherwise.
        pattern: the ready pattern that was found (``bias_gelu``), and how it is spelled (``bias_gelu:tanh``);
            empty where none was looked for.
        scalars: numbers that the pattern leaves open, e.g. ``{"eps": 1e-06}``.
    """

    path: str
    nodes: tuple[str, ...]
    inputs: tuple[str, ...] = ()
    pattern: str = ""
    scalars: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        title = f" {self.pattern}" if self.pattern else ""
        return f"{self.path or '<model>'}:{title} {', '.join(self.nodes)}"

    def __or__(self, other: Subgraph) -> Subgraph:
        """Both together, to be handled as one.

        Raises:
            ScheduleError: they are parts of different modules.
        """
        if self.path != other.path:
            what = f"parts of two modules can't be one: {self.path} and {other.path}"
            raise ScheduleError(Problem(what, self.path, caller_source(), "trace the module around both"))
        return Subgraph(self.path, tuple(dict.fromkeys([*self.nodes, *other.nodes])))

    def as_data(self) -> dict[str, Any]:
        """What a record keeps beside its own path: ``Subgraph(path, **data)`` is equal to this one.

        Without the path, so that the records of layers that are alike are alike.
        """
        every = {
            "nodes": self.nodes,
            "inputs": self.inputs,
            "pattern": self.pattern,
            "scalars": dict(self.scalars),
        }
        return {name: value for name, value in every.items() if value}


def as_subgraph(value: Subgraph | Mapping[str, Any], path: str, primitive: str) -> Subgraph:
    """What a primitive was given, found by ``find`` or read from a record; it must belong to its module.

    Raises:
        ScheduleError: it is a part of another module, has no operations, or is no sub-graph at all.
    """
    if isinstance(value, Mapping):
        value = Subgraph(path, **value)
    if not isinstance(value, Subgraph):
        given = "a list of them" if isinstance(value, Sequence) and not isinstance(value, str) else repr(value)
        remedy = "give one Subgraph, as sch[...].find(...) returns them in a list; join several with |"
        raise ScheduleError(Problem(f"{primitive} takes a sub-graph, not {given}", path, caller_source(), remedy))
    if value.path != path:
        what = f"{primitive}: the sub-graph is a part of {value.path or 'the model'}, not of this module"
        remedy = f'call it on sch["{value.path}"]'
        raise ScheduleError(Problem(what, path, caller_source(), remedy))
    if not value.nodes:
        raise ScheduleError(Problem(f"{primitive}: the sub-graph has no operations", path, caller_source()))
    return value
