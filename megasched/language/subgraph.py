"""Defines ``Subgraph``: operations of a traced module by name, in plain data that a record can keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megasched.errors import Problem, ScheduleError
from megasched.language.records import caller_source


@dataclass(frozen=True)
class Subgraph:
    """Represents operations of one traced module by their names.

    Attributes:
        path: the traced module.
        nodes: names of the operations, in the order in which they run.
        inputs: names of the outside values that they read, in the order of the pattern's parameters, or else of
            the operations.
        pattern: the built-in pattern that was found (``bias_gelu``), and its spelling (``bias_gelu:tanh``);
            empty if no pattern was searched for.
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
        """Returns the union of both, to be handled as one.

        Raises:
            ScheduleError: they are parts of different modules.
        """
        if self.path != other.path:
            what = f"parts of two modules can't be one: {self.path} and {other.path}"
            raise ScheduleError(Problem(what, self.path, caller_source(), "trace the module around both"))
        return Subgraph(self.path, tuple(dict.fromkeys([*self.nodes, *other.nodes])))

    def as_data(self) -> dict[str, Any]:
        """Returns the data that a record keeps beside its own path: ``Subgraph(path, **data)`` equals this one.

        The path is left out, so that identical layers have equal records.
        """
        every = {
            "nodes": self.nodes,
            "inputs": self.inputs,
            "pattern": self.pattern,
            "scalars": dict(self.scalars),
        }
        return {name: value for name, value in every.items() if value}


def as_subgraph(value: Subgraph | Sequence[Subgraph] | Mapping[str, Any], path: str, primitive: str) -> Subgraph:
    """Checks and returns the sub-graph passed to a primitive, found by ``find`` or read from a record.

    A list that holds a single one stands for that one.

    Raises:
        ScheduleError: it is part of another module, has no operations, or is no sub-graph at all.
    """
    if isinstance(value, Mapping):
        value = Subgraph(path, **value)
    elif isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
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
