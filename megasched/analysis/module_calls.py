"""What the code of single modules does in a labelled run: recorded, to be compared with what it does on a rank."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from megasched.analysis.labelling import Labelling
from megasched.analysis.labels import TpSpec
from megasched.analysis.sequence_trial import COUNTING, goes_by_numbers, numbers_given, numbers_in
from megasched.analysis.sites import Site
from megasched.analysis.tape import Call, Operation
from megasched.analysis.trees import snapshot
from megasched.language.tensor_types import ShardDim

# They say nothing of shapes, and are not always there: a reshape copies where it can give no view, which may be
# otherwise for one head of several; whether a new constant is detached depends on the modes that are on.
SAME = (torch.ops.aten.clone.default, torch.ops.aten.detach.default)

_PLAIN = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device))
_SHARED = (torch.Tensor, nn.Module)


class Placed(NamedTuple):
    """A shape, and how it is cut over TP.

    Attributes:
        one_value: number of a tensor that has one value everywhere: a rank may make it of any size. None of
            any other tensor.
    """

    shape: tuple[int, ...]
    along: ShardDim | None = None
    one_value: int | None = None

    def on_rank(self, tp: int) -> tuple[int, ...]:
        if self.along is None:
            return self.shape
        shape = list(self.shape)
        shape[self.along.dim] = self.along.on_rank(shape[self.along.dim], tp)
        return tuple(shape)


@dataclass(frozen=True)
class Argument:
    """A tensor that a module was handed."""

    tensor: torch.Tensor
    placed: Placed | None

    def on_rank(self, tp: int, made: Mapping[int, tuple[int, ...]]) -> torch.Tensor:
        shape = None if self.placed is None else self.placed.on_rank(tp)
        if self.placed is not None and self.placed.one_value is not None:
            shape = made.get(self.placed.one_value, shape)
        same = shape is None or shape == tuple(self.tensor.shape)
        return self.tensor if same else torch.empty(shape, dtype=self.tensor.dtype, device="meta")


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module.

    Attributes:
        args, kwargs: its arguments, each tensor an ``Argument``.
        results: what its operations give, in their order; None where it is not known how that is cut. What layers
            inside do is not among them.
        numbers: by which its operations go, and of which it makes tensors.
        columns: whose output its own code works on.
        layers: path of a layer that it calls -> what that gave, call by call.
        answers: to the questions of its code; see ``DefaultScalars``.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Placed | None, ...]
    numbers: tuple[tuple[float, ...], ...]
    columns: frozenset[str]
    layers: dict[str, list[Any]] = field(default_factory=dict)
    answers: tuple[tuple[Site, int], ...] = ()

    @property
    def of_one_value(self) -> list[int]:
        """Their numbers, in the order of the operations that gave them."""
        return [place.one_value for place in self.results if place is not None and place.one_value is not None]

    def arguments(self, tp: int, made: Mapping[int, tuple[int, ...]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """As one of ``tp`` ranks is handed them; ``made``: shapes of what a rank made itself (``one_value``)."""
        local = lambda leaf: leaf.on_rank(tp, made)  # noqa: E731
        given = torch.utils._pytree.tree_map_only(Argument, local, (self.args, self.kwargs))
        return snapshot(given)

    def kind(self, made: Mapping[int, tuple[int, ...]]) -> tuple[Any, ...]:
        """Equal for calls of modules alike that do the same on a rank."""
        leaves, structure = torch.utils._pytree.tree_flatten((self.args, self.kwargs))
        handed = tuple(_handed(leaf, made) for leaf in leaves)
        return handed, str(structure), tuple(map(_unnumbered, self.results)), self.numbers, self.answers


@dataclass
class _Open:
    """A call that has not ended: what it has done so far, as ``ModuleCall`` has it.

    Attributes:
        long: ids of tensors that it made of nothing, as long as a sequence.
        meets_long: it did something with one of these and with activations.
    """

    long: set[int] = field(default_factory=set)
    meets_long: bool = False
    columns: set[str] = field(default_factory=set)
    results: list[Placed | None] = field(default_factory=list)
    numbers: list[tuple[float, ...]] = field(default_factory=list)
    layers: dict[str, list[Any]] = field(default_factory=dict)


class RecordedCalls(Labelling):
    """Keeps, of each module whose own code works on shards, the first call."""

    def __init__(self, *given: Any, **more: Any) -> None:
        self.open: list[_Open] = []  # labels are set from the beginning
        # Path of a module that makes something as long as the sequence -> columns that its own code works on, and
        # the module that would be a region.
        self.reading_lengths: dict[str, tuple[frozenset[str], str | None]] = {}
        super().__init__(*given, **more)
        self.apart = frozenset(self.structure.layer_paths() if self.structure else ())

    def enter(self, call: Call) -> None:
        """See ``TapeReader``."""
        self.open.append(_Open())  # what it takes a part of is its own affair
        super().enter(call)

    def leave(self, call: Call) -> None:
        """See ``TapeReader``."""
        done = self.open.pop()
        path = call.path
        if done.meets_long and done.columns:
            self.reading_lengths[path] = frozenset(done.columns), self._around()
        if done.columns and path not in self.derived.calls:
            placed = lambda tensor: Argument(tensor, self._placed(tensor))  # noqa: E731
            args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, placed, (call.args, call.kwargs))
            self.derived.calls[path] = ModuleCall(
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
        """What a call did is a part of what the call around it does, but for a layer's: that runs by itself."""
        if path in self.apart:
            around.layers.setdefault(path, []).append(output)
            return
        around.results += call.results
        around.numbers += call.numbers
        for layer, outputs in call.layers.items():
            around.layers.setdefault(layer, []).extend(outputs)

    def _set(self, tensor: torch.Tensor, label: TpSpec) -> None:
        super()._set(tensor, label)
        if label.region == "T" and self.open:
            self.open[-1].columns |= label.columns

    def operation(self, operation: Operation) -> None:
        """See ``TapeReader``."""
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
        """See ``LabelRun``. A length of what code makes was read off what its module is handed, or off what a
        column gave: under sequence parallelism these are two, but for a region."""
        super().want_lengths(entered)
        for path, (columns, around) in self.reading_lengths.items():
            of_heads = not columns.isdisjoint(self.derived.by_heads)  # it reads the whole length then
            if around in self.regions or (of_heads and all(column in entered for column in columns)):
                continue
            if not self._ask_for(around):
                self._problem_at(
                    path,
                    "makes something as long as the sequence, for what columns give, or for a part of it",
                    "switch sequence parallelism off for this architecture",
                )

    def numbers_given(self, values: Any) -> None:
        """See ``TapeReader``."""
        if self.open and not self.silent and (numbers := numbers_given(values)):
            self.open[-1].numbers.append(tuple(numbers))

    def _placed(self, tensor: torch.Tensor) -> Placed | None:
        """None where it is not known what a rank has."""
        if id(tensor) in self.weights:
            return None
        label = self.label(tensor)
        if label.region == "T":
            return None if label.along is None else Placed(tuple(tensor.shape), label.along)
        # What is expanded was made as large as another tensor, which may be cut.
        expanded = any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        return None if expanded else Placed(tuple(tensor.shape), one_value=self.alike.get(id(tensor)))


def _unnumbered(place: Placed | None) -> Placed | None:
    return place if place is None or place.one_value is None else place._replace(one_value=0)


def _handed(leaf: Any, made: Mapping[int, tuple[int, ...]]) -> Any:
    """What tells an argument from those of another call; an unknown object is only like itself."""
    if isinstance(leaf, Argument):
        place = leaf.placed
        shape = None if place is None or place.one_value is None else made.get(place.one_value)
        return tuple(leaf.tensor.shape), leaf.tensor.dtype, place and _unnumbered(place), shape
    return (type(leaf), leaf) if type(leaf) in _PLAIN else id(leaf)


def numbers_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[tuple[float, ...]]:
    """The plain numbers of an operation that goes by them: they may have been read off a size."""
    counts = func.__name__.partition(".")[0] in COUNTING
    return [tuple(numbers_in(args, kwargs))] if counts or goes_by_numbers(func) else []
