"""What a definition looks like when it runs: its layers, what comes before and after them.

Found by two calls on meta with different batch and sequence sizes, never by names. This is what lets a
stage be cut out of any definition whose layers form a list.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import nn

from megasched.errors import Problem, ScheduleError
from megasched.lowering.crossing import UsesRun
from megasched.lowering.meta_call import (
    call_hooks,
    meta_copy,
    run_on_meta,
    tensors_in,
    token_inputs,
)
from megasched.objectives import objective_of

# Two (batch, sequence) sizes: a dimension of an output that follows either shows itself by the difference.
_SIZES = ((2, 5), (3, 7))


@dataclass(frozen=True)
class Slot:
    """Where the hidden state stands in a layer's call and in what it returns.

    Attributes:
        argument: position (int) or name (str) of the hidden state among the layer's arguments.
        output: its index in the returned tuple or list; None when the layer returns the tensor itself.
        others: what else the layer returns beside the hidden state, tensors left out (None in their place).
    """

    argument: int | str
    output: int | None
    others: tuple[Any, ...] = ()
    as_list: bool = False

    def get(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """The hidden state among a layer's arguments."""
        if isinstance(self.argument, int) and self.argument < len(args):
            return args[self.argument]
        return kwargs[self.argument] if isinstance(self.argument, str) else kwargs["hidden_states"]

    def put(
        self, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same arguments with another hidden state."""
        if isinstance(self.argument, int) and self.argument < len(args):
            return (*args[: self.argument], hidden, *args[self.argument + 1 :]), kwargs
        name = self.argument if isinstance(self.argument, str) else "hidden_states"
        return args, {**kwargs, name: hidden}

    def result(self, output: Any) -> torch.Tensor:
        """The hidden state in what a layer returned."""
        return output if self.output is None else output[self.output]

    def wrap(self, hidden: torch.Tensor) -> Any:
        """A hidden state in the structure that the layer returns."""
        if self.output is None:
            return hidden
        found = list(self.others)
        found[self.output] = hidden
        return found if self.as_list else tuple(found)

    def rewrap(self, output: Any, hidden: torch.Tensor) -> Any:
        """What a layer returned, with another hidden state."""
        if self.output is None:
            return hidden
        kept = list(output)
        kept[self.output] = hidden
        return kept if self.as_list else tuple(kept)


@dataclass(frozen=True)
class Shape:
    """Shape of an output as it follows the batch ``b`` and sequence ``s``: each dimension a number or a word."""

    dims: tuple[int | str, ...]
    dtype: torch.dtype

    def sizes(self, batch: int, length: int) -> tuple[int, ...]:
        words = {"b": batch, "s": length, "b*s": batch * length}
        return tuple(words[dim] if isinstance(dim, str) else dim for dim in self.dims)


@dataclass
class Structure:
    """How a definition runs.

    Attributes:
        layers: path of the ``ModuleList`` whose children are the layers.
        slot: where the hidden state stands in each layer's call.
        before: path -> output shape of each module with parameters of its own that runs before the layers.
        after: paths of modules with parameters of their own that run after the layers, in call order.
        repeated: whether layers are called more than once (ALBERT's are shared).
        trial: example arguments of the forward, on meta, labels included.
        calls_loss: whether the forward computes its loss by ``loss_function``; one that does it by itself gets no
            labels, and its logits are taken.
        crosses: whether layers read more of what comes before them than the hidden state.
    """

    layers: str
    count: int
    slot: Slot
    before: dict[str, Shape] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    crosses: bool = False
    calls_loss: bool = True
    repeated: bool = False
    trial: dict[str, torch.Tensor] = field(default_factory=lambda: token_inputs(*_SIZES[0]))

    def trial_inputs(self) -> dict[str, torch.Tensor]:
        """What a trial call gets, on meta: what a batch has, and labels where the forward has a use for them."""
        inputs = {name: tensor.clone() for name, tensor in self.trial.items()}
        if not self.calls_loss:
            del inputs["labels"]
        return inputs

    def layer_path(self, index: int) -> str:
        return f"{self.layers}.{index}"

    def layer_paths(self) -> list[str]:
        return [self.layer_path(index) for index in range(self.count)]

    def index_of(self, path: str) -> int | None:
        """Index of the layer that the module at ``path`` is or lies in; None outside the layers."""
        if not path.startswith(self.layers + "."):
            return None
        return int(path[len(self.layers) + 1 :].partition(".")[0])


@dataclass
class _Call:
    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    end: int = -1
    began: int = 0
    ended: int = 0


class _Enough(BaseException):
    """Ends a trial call early. No error, so nothing that catches errors may catch it."""


def _record(model: nn.Module, batch: int, length: int, limit: int | None = None) -> tuple[list[_Call], UsesRun]:
    """Every module call of one forward, in order; holds the tensors, so that identities stay comparable.

    Args:
        limit: the forward ends after this many calls.
    """
    uses = UsesRun(model.parameters())
    calls: list[_Call] = []
    open_calls: list[_Call] = []

    def before(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if len(calls) == limit:
            raise _Enough
        call = _Call(path, args, kwargs, began=uses.count)
        calls.append(call)
        open_calls.append(call)

    def after(path: str, module: nn.Module, output: Any) -> None:
        call = open_calls.pop()
        call.output = output
        call.end, call.ended = len(calls), uses.count

    inputs = objective_of(model).trial_inputs(getattr(model, "config", None), batch, length)
    with suppress(_Enough), call_hooks(model, before, after):
        run_on_meta(model, inputs, uses)
    return calls, uses


def _calls_loss(model: nn.Module) -> bool:
    """Whether the forward hands all logits, and the labels as it got them, to ``loss_function``."""
    called = []
    inputs = _trial(model)

    def loss(logits: torch.Tensor, labels: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        called.append(logits.shape[:-1] == _SIZES[0] and labels is inputs["labels"])
        raise _Enough

    real = getattr(model, "loss_function", None)
    model.loss_function = loss
    with suppress(_Enough, ScheduleError), call_hooks(model):  # its own loss may not take labels as long as these
        run_on_meta(model, inputs)
    model.loss_function = real
    return called == [True]


def _trial(model: nn.Module) -> dict[str, torch.Tensor]:
    return objective_of(model).trial(getattr(model, "config", None), *_SIZES[0])


def find_structure(model: nn.Module) -> Structure:
    """The structure of an HF model that was built for an objective.

    Raises:
        ScheduleError: no list of layers is called one after the other, or the model can't run on meta.
    """
    probe = meta_copy(model)
    first, uses = _record(probe, *_SIZES[0])
    calls_loss = _calls_loss(probe)
    layers, repeated = _find_layers(probe, first)
    count = len(probe.get_submodule(layers))
    paths = {f"{layers}.{i}" for i in range(count)}
    calls = [c for c in first if c.path in paths]
    slot = _find_slot(calls)
    hidden = [slot.result(call.output) for call in calls]
    crosses = uses.crosses([(call.began, call.ended) for call in calls], hidden)
    owners = {path for path, m in probe.named_modules() if next(m.parameters(recurse=False), None) is not None}
    start, end = first.index(calls[0]), calls[-1].end
    outside = {path for path in owners if not path.startswith(layers + ".")}
    leading = [c for c in first[:start] if c.path in outside]
    second, _ = _record(probe, *_SIZES[1], limit=max((c.end for c in leading), default=0))
    shapes = {c.path: _shape(c, _at(second, c.path)) for c in leading}
    after = tuple(dict.fromkeys(c.path for c in first[end:] if c.path in outside))
    return Structure(layers, count, slot, shapes, after, crosses, calls_loss, repeated, _trial(probe))


def _find_layers(model: nn.Module, calls: list[_Call]) -> tuple[str, bool]:
    """The list, and whether some of its layers are called more than once in a row (shared layers)."""
    found = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        children = [f"{path}.{i}" for i in range(len(module))]
        members = set(children)
        order = [call.path for call in calls if call.path in members]
        size = sum(p.numel() for p in module.parameters())
        if [child for child, _ in groupby(order)] == children:
            found.append((order == children, size, path))
    if not found:
        remedy = "pipeline stages and sequence parallelism need a ModuleList called layer by layer, each once"
        raise ScheduleError(Problem("no list of layers found in the model", remedy=remedy))
    once, _, path = max(found, key=lambda one: one[:2])  # the first of those that are as large
    return path, not once


def _find_slot(calls: list[_Call]) -> Slot:
    """Where the hidden state is: the argument that is, for most layers, what the layer before returned."""
    votes: Counter[int | str] = Counter()
    for previous, call in pairwise(calls):
        returned = {id(t) for t in tensors_in(previous.output)}
        for key, value in [*enumerate(call.args), *call.kwargs.items()]:
            if isinstance(value, torch.Tensor) and id(value) in returned:
                votes[key] += 1
    if votes:
        argument = votes.most_common(1)[0][0]
    else:  # one layer, or an operation between the layers: the first float tensor
        given = [*enumerate(calls[0].args), *calls[0].kwargs.items()]
        argument = next(k for k, v in given if isinstance(v, torch.Tensor) and v.is_floating_point())
    output = calls[-1].output
    if isinstance(output, torch.Tensor):
        return Slot(argument, None)
    first = calls[0]
    hidden = first.args[argument] if isinstance(argument, int) else first.kwargs[argument]
    fits = [i for i, v in enumerate(output) if isinstance(v, torch.Tensor) and v.shape == hidden.shape]
    others = tuple(None if isinstance(v, torch.Tensor) else v for v in output)
    return Slot(argument, fits[0], others, isinstance(output, list))


def _at(calls: list[_Call], path: str) -> _Call:
    return next(call for call in calls if call.path == path)


def _shape(first: _Call, second: _Call) -> Shape:
    if not isinstance(first.output, torch.Tensor):
        remedy = "it must return one tensor to be left out on later stages"
        raise ScheduleError(Problem("a module before the layers returns no tensor", first.path, remedy=remedy))
    words = {(b1, b2): word for (b1, b2), word in _words().items()}
    dims: list[int | str] = []
    for one, two in zip(first.output.shape, second.output.shape, strict=True):
        if one != two and (one, two) not in words:
            what = f"an output dimension follows neither batch nor sequence ({one}, {two})"
            raise ScheduleError(Problem(what, first.path))
        dims.append(one if one == two else words[one, two])
    return Shape(tuple(dims), first.output.dtype)


def _words() -> dict[tuple[int, int], str]:
    (b1, s1), (b2, s2) = _SIZES
    return {(b1, b2): "b", (s1, s2): "s", (b1 * s1, b2 * s2): "b*s"}
