"""Runs the code of single modules again with one rank's tensors, and compares it with the labelled run.

A definition's code reads sizes off its tensors, and off attributes of its modules. Labels follow tensors, but not
such numbers. Run with a rank's shapes, the code shows what it makes of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from megasched.analysis.notes.made import VIEWS
from megasched.analysis.recording.meta_call import (
    Functions,
    ScalarAnswers,
    call_hooks,
    loss_function_of,
    tensors_in,
)
from megasched.analysis.recording.numbers import numbers_given
from megasched.analysis.tp.module_call import ModuleCall
from megasched.analysis.tp.module_calls import SAME, numbers_of
from megasched.attributes import replaced
from megasched.definition import attention_interface
from megasched.definition.images.convolutions import cut_axes, is_batch_norm, is_convolution
from megasched.definition.linears import output_axis
from megasched.definition.undisturbed import undisturbed
from megasched.language.roles import Cut
from megasched.language.tensor_types import ShardDim

# Which layer a module is of, as HF calls it: no count, and other than that layers may be the same.
PLACES = frozenset(["layer_idx", "layer_id", "layer_number", "block_idx"])


@dataclass(frozen=True)
class Rank:
    """Holds what one rank has of each linear, and of the counts that modules hold."""

    tp: int
    cuts: Mapping[str, Cut]
    components: Mapping[str, tuple[int, ...]]
    heads: Mapping[str, tuple[int, ...]]

    def sizes(self, path: str, linear: nn.Module) -> tuple[int, int | None]:
        """Returns the features that the cut module at ``path`` returns and takes; an embedding takes None."""
        if self.cuts[path] == "features":
            return linear.weight.shape[1] // self.tp, None
        axis = output_axis(linear)
        out, taken = linear.weight.shape[axis], linear.weight.shape[1 - axis]
        if self.cuts[path] == "row":
            return out, taken // self.tp
        along = ShardDim(0, components=self.components.get(path, ()), heads=self.heads.get(path, ()))
        return along.on_rank(out, self.tp), taken

    def count(self, path: str, whole: int) -> int | None:
        """Returns a rank's part of a count of the module at ``path``; None where it can have no part of it."""
        replicated = {n for inner, heads in self.heads.items() if inner.startswith(f"{path}.") for n in heads if n}
        return local_count(whole, self.tp, replicated)


class Mismatch(Exception):
    """Reports that a module does something else on a rank than the labelled run says."""


class Replay(ScalarAnswers):
    """Runs one module's forward with a rank's tensors, and compares every operation with its expected output.

    Attributes:
        made: shapes that a rank has of tensors of one value everywhere, by their numbers. They may be of any size.
            Tensors made of them must fit, and what counts their elements (a sum) must not depend on the size.
    """

    def __init__(self, call: ModuleCall, tp: int) -> None:
        super().__init__(answers=dict(call.answers))
        self.expected, self.done = call.results, 0
        self.numbers, self.computed, self.tp = call.numbers, 0, tp
        self.made: dict[int, tuple[int, ...]] = {}
        # Tensors of one value everywhere, and whether they have another size than the whole.
        self._alike: dict[int, tuple[torch.Tensor, bool]] = {}

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = super().execute(func, args, kwargs)
        if func in SAME:
            for tensor in tensors_in(output):
                if (alike := self._alike.get(id(args[0]))) is not None:
                    self._alike[id(tensor)] = tensor, alike[1]
        elif not self.silent:
            for numbers in numbers_of(func, args, kwargs):
                self._compute(numbers)
            self._refuse_counting(func, tensors_in((args, kwargs)))
            for tensor in tensors_in(output):
                if self.done == len(self.expected):
                    raise Mismatch
                wanted = self.expected[self.done]
                self.done += 1
                if wanted is not None and wanted.one_value is not None:
                    self.made[wanted.one_value] = tuple(tensor.shape)
                    self._alike[id(tensor)] = tensor, tuple(tensor.shape) != wanted.shape
                elif wanted is not None and wanted.on_rank(self.tp) != tuple(tensor.shape):
                    raise Mismatch
        return output

    def _refuse_counting(self, func: Any, operands: list[torch.Tensor]) -> None:
        """Refuses an operation that depends on how many elements a tensor of one value everywhere has.

        It takes only such tensors, of another size than the whole, and is neither element-wise nor a view.
        """
        alike = [self._alike[id(tensor)][1] for tensor in operands if id(tensor) in self._alike]
        if any(alike) and len(alike) == len(operands):
            by_elements = torch.Tag.pointwise in getattr(func, "tags", ())
            if not by_elements and func.__name__.partition(".")[0] not in VIEWS:
                raise Mismatch

    def numbers_given(self, values: Any) -> None:
        if not self.silent and (numbers := numbers_given(values)):
            self._compute(tuple(numbers))

    def attend(
        self, real: Callable[..., Any], module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Stands in the registry of attention functions for ``real``, with a rank's part of the sinks."""
        with self.silently():
            sinks = kwargs.get("s_aux")
            if sinks is not None and sinks.dim() == 1:  # of which a rank takes those of its heads
                kwargs["s_aux"] = sinks[: query.shape[1]]
            return real(module, query, *args, **{**kwargs, "dropout": 0.0})

    def lose(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Stands in for a definition's ``loss_function``."""
        with self.silently():
            return logits.new_zeros(())

    def _compute(self, numbers: tuple[float, ...]) -> None:
        if self.numbers[self.computed : self.computed + 1] != (numbers,):
            raise Mismatch
        self.computed += 1


def replay(
    module: nn.Module,
    path: str,
    call: ModuleCall,
    tp: int,
    cuts: Container[str],
    made: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
) -> dict[int, tuple[int, ...]] | None:
    """Runs a module with a rank's tensors.

    Args:
        call: the recorded call of the module.
        cuts: paths of what was cut in that call, whose own operations are not among the recorded ones.
        made: shapes made by the modules before, as this function returns them.

    Returns:
        ``Replay.made``; None where the module does something else on a rank than the labelled run says.
    """
    run = Replay(call, tp)

    def before(inner: str, child: nn.Module, args: Any, kwargs: Any) -> None:
        run.silent += join(path, inner) in cuts

    def after(inner: str, child: nn.Module, output: Any) -> None:
        run.silent -= join(path, inner) in cuts

    args, kwargs = call.arguments(tp, made)
    try:
        with (
            attention_interface.use_attention(partial(run.attend, attention_interface.registered())),
            loss_function_of(module, run.lose) if hasattr(module, "loss_function") else nullcontext(),
            _given_by_layers(module, path, call),
            call_hooks(module, before, after),
            undisturbed(module),
            torch.no_grad(),
            torch.device("meta"),
            Functions(run),
            run,
        ):
            module(*args, **kwargs)
    except Exception:  # whatever a forward raises over shapes that do not fit
        return None
    complete = (run.done, run.computed) == (len(call.results), len(call.numbers))
    return run.made if complete else None


@contextmanager
def _given_by_layers(module: nn.Module, path: str, call: ModuleCall) -> Iterator[None]:
    """Runs its body with layers that only return their outputs of the labelled run."""
    with ExitStack() as stack:
        for full, outputs in call.layers.items():
            layer = module.get_submodule(full.removeprefix(f"{path}.") if path else full)
            stack.enter_context(replaced(layer, "forward", partial(_next, iter(outputs))))
        yield


def _next(given: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
    return next(given)


@contextmanager
def divided(module: nn.Module, counts: Mapping[str, int]) -> Iterator[None]:
    before = dict(vars(module))
    if any(name.startswith("config.") for name in counts):
        module.config = copy.copy(module.config)
    for name, count in counts.items():
        owner = module.config if name.startswith("config.") else module
        setattr(owner, name.removeprefix("config."), count)
    try:
        yield
    finally:
        vars(module).clear()
        vars(module).update(before)


@contextmanager
def local_linears(module: nn.Module, path: str, rank: Rank) -> Iterator[None]:
    """Runs its body with linears and embeddings inside that take and return what they do on one rank."""
    with ExitStack() as stack:
        for inner, child in module.named_modules():
            full = join(path, inner)
            cut = rank.cuts.get(full)
            if cut is not None and (is_convolution(child) or is_batch_norm(child)):
                stack.enter_context(_local_channels(child, cut, rank.tp))
                continue
            if cut not in ("column", "row", "features"):
                continue
            features, taken = rank.sizes(full, child)
            stack.callback(child._parameters.update, dict(child._parameters))
            child._parameters.update(_local_parameters(child, features, taken))
            stack.enter_context(replaced(child, "forward", partial(_handed_out, features, taken)))
        yield


@contextmanager
def _local_channels(module: nn.Module, cut: Cut, tp: int) -> Iterator[None]:
    """Runs its body with a convolution or a batch norm that has one rank's tensors, and its own code."""
    before = dict(vars(module))
    parameters, buffers = dict(module._parameters), dict(module._buffers)
    for name, axis in cut_axes(module, cut).items():
        held: Any = parameters.get(name, buffers.get(name))
        local = held.new_empty([n // tp if dim == axis else n for dim, n in enumerate(held.shape)])
        if name in parameters:
            parameters[name] = nn.Parameter(local, requires_grad=held.requires_grad)
        else:
            buffers[name] = local
    vars(module).update(_parameters=parameters, _buffers=buffers)
    if cut == "channels" and is_convolution(module):
        module.groups //= tp
    try:
        yield
    finally:
        vars(module).clear()
        vars(module).update(before)


def _handed_out(features: int, taken: int | None, x: torch.Tensor) -> torch.Tensor:
    """Returns the output on one rank of a linear, or of an embedding, which takes ids."""
    if taken is None:
        return torch.empty(*x.shape, features, device="meta")
    if x.shape[-1] != taken:
        raise Mismatch
    return torch.empty(*x.shape[:-1], features, dtype=x.dtype, device="meta")


def _local_parameters(child: nn.Module, features: int, taken: int | None) -> dict[str, nn.Parameter]:
    """Returns a rank's weight and bias, as a definition's code may read its sizes off them."""
    weight, bias = child.weight, getattr(child, "bias", None)
    shape = [features, taken] if taken is not None else [weight.shape[0], features]
    if taken is not None and output_axis(child) == 1:
        shape.reverse()
    local = {"weight": nn.Parameter(weight.new_empty(shape), requires_grad=weight.requires_grad)}
    if bias is not None:
        local["bias"] = nn.Parameter(bias.new_empty(features), requires_grad=bias.requires_grad)
    return local


def join(path: str, inner: str) -> str:
    """Returns the path of a module inside of another one."""
    return f"{path}.{inner}" if path and inner else path or inner


def local_count(whole: int, tp: int, replicated: Iterable[int]) -> int | None:
    """Returns a rank's part of a count, or 1 for replicated heads; None where it is neither."""
    if whole % tp == 0:
        return whole // tp
    return 1 if whole in replicated else None
