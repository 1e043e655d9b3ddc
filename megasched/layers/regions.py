"""Moves activations between three layouts: whole, split along the sequence, and inside a TP region.

All functions wrap ``module.forward`` (``wrap.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import nn

from megasched.analysis.recording.meta_call import tensors_in
from megasched.analysis.stages.hidden_state import HiddenStateArg
from megasched.analysis.stages.hooked_outputs import LeafPath, change_leaves
from megasched.analysis.tp.sliced_args import ArgSlice
from megasched.errors import ConfigError
from megasched.graph import opaque
from megasched.language.tensor_types import ShardDim
from megasched.layers.wrap import Forward, wrap_forward
from megasched.plan.plan import Plan


def enter_region(
    module: nn.Module,
    slots: Sequence[int | str],
    group: Any,
    split: bool,
    *,
    needed: bool = False,
    whole: Collection[int | str] = (),
) -> None:
    """Brings the arguments at ``slots`` into a TP region once, for all column linears inside.

    Forward: identity, or all-gather along the sequence. Backward: all-reduce, or reduce-scatter. The
    column linears inside then reduce no gradients themselves.

    Args:
        needed: operations other than linears read the arguments too, and may need contiguous tensors to view.
        whole: slots of a needed region that are not split along the sequence.
    """
    if needed:
        transfer = functools.partial(_gather_contiguous if split else all_reduce_gradient, group=group)
    else:
        transfer = functools.partial(
            gather_for_region if split else copy_to_tensor_model_parallel_region, group=group
        )
    # In a graph of a module around this one it stays a call: a trace would lose its backward.
    take = functools.partial(opaque.call, "enter_region", transfer)
    take_whole = functools.partial(
        opaque.call, "enter_region", functools.partial(all_reduce_gradient, group=group)
    )

    def entered(forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        found = dict([*enumerate(args), *kwargs.items()])
        given = {id(found[slot]): slot for slot in slots}  # one tensor may stand in several
        taken = {key: (take_whole if slot in whole else take)(found[slot]) for key, slot in given.items()}
        found.update({slot: taken[id(found[slot])] for slot in slots})
        return forward(*(found[index] for index in range(len(args))), **{name: found[name] for name in kwargs})

    wrap_forward(module, entered)


def leave_region(module: nn.Module, slot: int | str, leaves: Mapping[int, ShardDim | None], group: Any) -> None:
    """Returns tensors from a region either whole or as this rank's part of the sequence.

    Inside a region each rank must have a part of the gradient: that of its part of the sequence, or an equal share
    of the gradient of the whole.

    Args:
        slot: an argument [b, s, ...] that the region takes over; it gives the batch size.
        leaves: index of each returned tensor that is whole inside -> how it is split on leaving: [b, s, ...] or
            flattened [b*s, ...]; None for those that stay whole.
    """
    share = functools.partial(opaque.call, "leave_region", functools.partial(_ScaleGradient.apply, group.size()))

    def left(forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        returned, structure = torch.utils._pytree.tree_flatten(forward(*args, **kwargs))
        batch = (args[slot] if isinstance(slot, int) else kwargs[slot]).shape[0]
        for index, along in leaves.items():
            whole = returned[index]
            returned[index] = share(whole) if along is None else _part(whole, along.dim, batch, group)
        return torch.utils._pytree.tree_unflatten(returned, structure)

    wrap_forward(module, left)


def share_recorded(path: str, module: nn.Module, leaves: Sequence[LeafPath], group: Any) -> None:
    """Gives each rank its share of the gradient of whole tensors that HF's hooks recorded inside regions.

    Args:
        module: the module around the layers, which returns the tensors.
        leaves: paths of the tensors in its output.
    """
    share = functools.partial(_ScaleGradient.apply, group.size())

    def shared(forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        return change_leaves(path, forward(*args, **kwargs), dict.fromkeys(leaves, share))

    wrap_forward(module, shared)


def _part(x: torch.Tensor, dim: int, batch: int, group: Any) -> torch.Tensor:
    """Returns this rank's part of the sequence.

    [b, s, ...] becomes [b, s / tp, ...] (``dim`` 1), and [b*s, ...] becomes [b*s / tp, ...] (``dim`` 0).
    """
    tokens = x if dim == 1 else x.unflatten(0, (batch, -1))
    size = tokens.shape[1] // group.size()
    part = tokens.narrow(1, size * group.rank(), size)
    return part if dim == 1 else part.flatten(0, 1)


def take_local_sequence(module: nn.Module, group: Any) -> None:
    """Gives a module inside a region this rank's part of the sequence: [b, s / tp, ...] of [b, s, ...]."""

    wrap_forward(module, lambda forward, x: forward(_part(x, 1, x.shape[0], group)))


def all_reduce_gradient(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Returns its input; the gradient is summed over TP.

    Megatron's ``copy_to_tensor_model_parallel_region`` sums in place, in the gradient that it is given; after an
    addition, the other operand gets that same tensor.
    """
    return _SumGradient.apply(x, group)


class _SumOverRanks:
    """Is the hook that sums a gradient over a group, scaled before."""

    def __init__(self, group: torch.distributed.ProcessGroup, scale: float | None) -> None:
        self.group, self.scale = group, scale

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.contiguous().clone() if self.scale is None else gradient.contiguous() * self.scale
        torch.distributed.all_reduce(total, group=self.group)
        return total


def sum_gradient(
    parameter: torch.Tensor, group: torch.distributed.ProcessGroup, scale: float | None = None
) -> None:
    """Has the gradient of a parameter summed over a group, scaled before; a second call has no effect."""
    hooks = (parameter._backward_hooks or {}).values()
    if parameter.requires_grad and not any(isinstance(hook, _SumOverRanks) for hook in hooks):
        parameter.register_hook(_SumOverRanks(group, scale))


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradients[0].contiguous().clone()
        torch.distributed.all_reduce(total, group=ctx.group)
        return total, None


class _ScaleGradient(torch.autograd.Function):
    """Returns its input; each rank takes an equal share of the gradient, which all ranks have whole."""

    @staticmethod
    def forward(ctx: Any, size: int, x: torch.Tensor) -> torch.Tensor:
        ctx.size = size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradients[0] / ctx.size


def gather_for_region(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Gathers [b, s / tp, h] to [b, s, h]; the gradient is summed over TP and split again."""
    whole = gather_from_sequence_parallel_region(
        x.transpose(0, 1).contiguous(), tensor_parallel_output_grad=True, group=group
    )
    return whole.transpose(0, 1)


def _gather_contiguous(x: torch.Tensor, group: Any) -> torch.Tensor:
    return gather_for_region(x, group).contiguous()


def split_sequence(layer: nn.Module, slot: HiddenStateArg, dim: int, group: Any) -> None:
    """Splits the hidden state along the sequence, its dimension ``dim``, as it enters this (first) layer."""

    def entered(forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        hidden = slot.get(args, kwargs)
        _check_length(hidden.shape[dim], group.size())
        args, kwargs = slot.put(_split(hidden, group, dim), args, kwargs)
        return forward(*args, **kwargs)

    wrap_forward(layer, entered)


def _check_length(length: int, tp: int) -> None:
    """Raises ConfigError where the TP ranks can't have equal parts of a sequence."""
    if length % tp:
        raise ConfigError(
            f"sequence parallelism: TP {tp} does not divide a sequence of {length} tokens; pad batches to a "
            f"multiple of {tp} (a tokenizer's pad_to_multiple_of={tp}), and generate text by a model without it"
        )


def split_arguments(layer: nn.Module, slots: Collection[int | str], group: Any) -> None:
    """Splits further arguments with a whole sequence, computed before the layers, as they enter this layer."""

    def entered(forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        args = tuple(_split(value, group) if index in slots else value for index, value in enumerate(args))
        kwargs = {name: _split(value, group) if name in slots else value for name, value in kwargs.items()}
        return forward(*args, **kwargs)

    if slots:
        wrap_forward(layer, entered)


def _split(x: torch.Tensor, group: Any, dim: int = 1) -> torch.Tensor:
    """Splits [b, s, ...] to [b, s / tp, ...], or along another dimension; the gradient is gathered."""
    return scatter_to_sequence_parallel_region(x.transpose(0, dim).contiguous(), group=group).transpose(0, dim)


def join_sequence(layer: nn.Module, slot: HiddenStateArg, dim: int, group: Any) -> None:
    """Gathers the hidden state along its dimension ``dim`` as it leaves this (last) layer.

    All TP ranks compute the same afterwards, so the gradient is only split again, not summed.
    """

    def left(forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        return slot.rewrap(output, _joined(slot.result(output), dim, group))

    wrap_forward(layer, left)


def _joined(part: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    """Gathers [b, s / tp, h] to [b, s, h], s at ``dim``; the gradient, which all ranks have whole, is split."""
    first = part.transpose(0, dim).contiguous()
    whole: torch.Tensor = gather_from_sequence_parallel_region(
        first, tensor_parallel_output_grad=False, group=group
    )
    return whole.transpose(0, dim)


def join_returned(
    around: Iterable[nn.Module], layers: Iterable[nn.Module], slot: HiddenStateArg, dim: int, group: Any
) -> None:
    """Gathers hidden states of between the layers that the modules around them return, such as HF's on request.

    Args:
        layers: those whose hidden state leaves them split.
        dim: the dimension along which it is split.
    """
    split: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()

    def remembered(forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        hidden = slot.result(output)
        split[id(hidden)] = hidden
        return output

    def is_split(leaf: Any) -> bool:
        return split.get(id(leaf)) is leaf

    def joined(forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if not any(map(is_split, tensors_in(output))):
            return output
        return torch.utils._pytree.tree_map(
            lambda leaf: _joined(leaf, dim, group) if is_split(leaf) else leaf, output
        )

    for layer in layers:
        wrap_forward(layer, remembered)
    for module in around:
        wrap_forward(module, joined)


def slices_of(plan: Plan, path: str) -> dict[int | str, ArgSlice]:
    """Returns the arguments of one module that are sliced by rank, by slot."""
    return {argument.slot: part for argument, part in plan.tp_facts.parts.items() if argument.path == path}


def slice_args(module: nn.Module, parts: Mapping[int | str, ArgSlice], group: Any) -> None:
    """Gives a module this rank's slice of these arguments: [..., heads / tp, ...] of [..., heads, ...].

    They carry no gradient, so nothing is communicated.
    """

    def taken(forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        found = dict([*enumerate(args), *kwargs.items()])
        found.update({slot: _taken(found[slot], part, group) for slot, part in parts.items()})
        return forward(*(found[index] for index in range(len(args))), **{name: found[name] for name in kwargs})

    wrap_forward(module, taken)


def _taken(x: torch.Tensor, part: ArgSlice, group: Any) -> torch.Tensor:
    """Returns this rank's slice, as a view if the dimension counts heads alone: masks of every head are large."""
    length = part.count // group.size()
    start = length * group.rank()
    if x.shape[part.dim] == part.count:
        return x.narrow(part.dim, start, length)
    apart = x.unflatten(part.dim, (-1, part.count))  # [b*heads, ...] -> [b, heads, ...]
    return apart.narrow(part.dim + 1, start, length).flatten(part.dim, part.dim + 1)
