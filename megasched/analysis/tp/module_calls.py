"""Keeps what the code of single modules does in a labelled run, to be compared with what it does on a rank."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

import torch

from megasched.analysis.recording.numbers import COUNTING, goes_by_numbers, numbers_given, numbers_in
from megasched.analysis.recording.tape import Call, Operation
from megasched.analysis.tp.calls import Labelling
from megasched.analysis.tp.facts import TpSpec
from megasched.analysis.tp.module_call import Argument, ModuleCall, Placed
from megasched.language.tensor_types import FEATURE_SHARD

# They say nothing of shapes, and are not always there: a reshape copies where it can give no view, which may be
# otherwise for one head of several; whether a new constant is detached depends on the modes that are on.
SAME = (torch.ops.aten.clone.default, torch.ops.aten.detach.default)


@dataclass
class _Open:
    """Holds what a call has done before its end, in the form of ``ModuleCall``.

    Attributes:
        long: ids of tensors that it made of nothing, as long as a sequence.
        meets_long: whether an operation took one of these and activations.
    """

    long: set[int] = field(default_factory=set)
    meets_long: bool = False
    columns: set[str] = field(default_factory=set)
    results: list[Placed | None] = field(default_factory=list)
    numbers: list[tuple[float, ...]] = field(default_factory=list)
    layers: dict[str, list[Any]] = field(default_factory=dict)


class RecordedCalls(Labelling):
    """Keeps the first call of each module whose own code works on shards."""

    def __init__(self, *given: Any, **more: Any) -> None:
        self.open: list[_Open] = []  # labels are set from the beginning
        # Path of a module that makes something as long as the sequence -> columns that its own code works on, and
        # the module that would be a region.
        self.reading_lengths: dict[str, tuple[frozenset[str], str | None]] = {}
        super().__init__(*given, **more)
        self.apart = frozenset(self.structure.layer_paths() if self.structure else ())

    def enter(self, call: Call) -> None:
        self.open.append(_Open())  # what it takes a part of is its own affair
        super().enter(call)

    def leave(self, call: Call) -> None:
        done = self.open.pop()
        path = call.path
        if done.meets_long and done.columns:
            self.reading_lengths[path] = frozenset(done.columns), self._around()
        if done.columns and path not in self.tp_facts.calls:
            placed = lambda tensor: Argument(tensor, self._placed(tensor))  # noqa: E731
            args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, placed, (call.args, call.kwargs))
            self.tp_facts.calls[path] = ModuleCall(
                args,
                kwargs,
                tuple(done.results),
                tuple(done.numbers),
                frozenset(done.columns),
                done.layers,
                tuple(self.tape.answers.items()),
            )
        super().leave(call)
        if self.open:
            self._within(self.open[-1], path, done, call.returned)

    def _within(self, around: _Open, path: str, call: _Open, output: Any) -> None:
        """Adds what a call did to the call around it, except for a layer, which runs by itself."""
        if path in self.apart:
            around.layers.setdefault(path, []).append(output)
            return
        around.results += call.results
        around.numbers += call.numbers
        for layer, outputs in call.layers.items():
            around.layers.setdefault(layer, []).extend(outputs)

    def _set(self, tensor: torch.Tensor, label: TpSpec) -> None:
        super()._set(tensor, label)
        if label.type == FEATURE_SHARD and self.open:
            self.open[-1].columns |= label.columns

    def operation(self, operation: Operation) -> None:
        super().operation(operation)
        if not self.open or self.silent:
            return
        self._follow_long(self.open[-1], operation.operands, operation.outputs)
        if operation.func not in SAME:
            self.open[-1].results += [self._placed(tensor) for tensor in operation.outputs]
            self.open[-1].numbers += numbers_of(operation.func, operation.args, operation.kwargs)

    def _follow_long(self, call: _Open, operands: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        made = {id(tensor) for tensor in operands} & call.long
        if any(self.label(tensor).active for tensor in operands):
            call.meets_long = call.meets_long or bool(made)
        elif made or not operands:
            call.long.update(id(tensor) for tensor in outputs if self.tokens[-1] in tensor.shape)

    def want_lengths(self, entered: Container[str]) -> None:
        """Asks for regions also for modules that make tensors as long as the sequence; see ``LabelRun``.

        Such a length was read off the module's input, or off a column's output. Under sequence parallelism these
        are two lengths, except in a region.
        """
        super().want_lengths(entered)
        for path, (columns, around) in self.reading_lengths.items():
            of_heads = not columns.isdisjoint(self.tp_facts.by_heads)  # it reads the whole length then
            if around in self.regions or (of_heads and all(column in entered for column in columns)):
                continue
            if not self._ask_for(around):
                self._problem_at(
                    path,
                    "makes something as long as the sequence, for what columns give, or for a part of it",
                    "switch sequence parallelism off for this architecture",
                )

    def numbers_given(self, values: Any) -> None:
        if self.open and not self.silent and (numbers := numbers_given(values)):
            self.open[-1].numbers.append(tuple(numbers))

    def _placed(self, tensor: torch.Tensor) -> Placed | None:
        """Returns a tensor's shape and cut; None where it is not known what a rank has of it."""
        if id(tensor) in self.weights:
            return None
        label = self.label(tensor)
        if label.type == FEATURE_SHARD:
            return None if label.along is None else Placed(tuple(tensor.shape), label.along)
        # What is expanded was made as large as another tensor, which may be cut.
        expanded = any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        return None if expanded else Placed(tuple(tensor.shape), one_value=self.alike.get(id(tensor)))


def numbers_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[tuple[float, ...]]:
    """Returns the plain numbers of an operation that depends on them, as code may have read them off a size."""
    counts = func.__name__.partition(".")[0] in COUNTING
    return [tuple(numbers_in(args, kwargs))] if counts or goes_by_numbers(func) else []
