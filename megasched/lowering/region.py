"""Where activations change hands between whole, split along the sequence, and taken over to TP.

Everything here wraps ``module.forward`` (``wrap.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import nn

from megasched.graph import opaque
from megasched.lowering.structure import Slot
from megasched.lowering.wrap import Forward, wrap_forward


def enter_region(
    module: nn.Module, slots: Sequence[int | str], group: Any, split: bool, *, whole: bool = False
) -> None:
    """Takes the arguments at ``slots`` over to TP once, for all column linears inside.

    Forward: identity, or all-gather along the sequence. Backward: all-reduce, or reduce-scatter. The
    columns inside then reduce nothing themselves.

    Args:
        whole: others than linears read it, which may view it as no transposed tensor can be.
    """
    if whole:
        transfer = functools.partial(_gather_contiguous if split else sum_gradient, group=group)
    else:
        transfer = functools.partial(
            _gather_for_region if split else copy_to_tensor_model_parallel_region, group=group
        )
    # In a graph of a module around this one it stays a call: a trace would lose its backward.
    take = functools.partial(opaque.call, "enter_region", transfer)

    def wrapper(forward: Forward) -> Forward:
        def entered(*args: Any, **kwargs: Any) -> Any:
            for slot in slots:
                if isinstance(slot, int):
                    args = (*args[:slot], take(args[slot]), *args[slot + 1 :])
                else:
                    kwargs = {**kwargs, slot: take(kwargs[slot])}
            return forward(*args, **kwargs)

        return entered

    wrap_forward(module, wrapper)


def leave_region(module: nn.Module, slot: int | str, leaves: Collection[int], group: Any, split: bool) -> None:
    """Hands out whole what is whole inside a region, or this rank's part of the sequence [b, s / tp, ...].

    Each rank then has a part of the gradient inside, as a region needs it: of its part of the sequence, or its
    share of the whole.

    Args:
        slot: an argument that the region takes over.
        leaves: which of the tensors that the module returns are whole.
    """
    share = functools.partial(opaque.call, "leave_region", functools.partial(_Share.apply, group.size()))

    def wrapper(forward: Forward) -> Forward:
        def left(*args: Any, **kwargs: Any) -> Any:
            returned, structure = torch.utils._pytree.tree_flatten(forward(*args, **kwargs))
            part = (args[slot] if isinstance(slot, int) else kwargs[slot]).shape[1]
            for index in leaves:
                if not split:
                    returned[index] = share(returned[index])
                elif returned[index].dim() > 1 and returned[index].shape[1] == part * group.size():
                    returned[index] = returned[index].narrow(1, part * group.rank(), part)
            return torch.utils._pytree.tree_unflatten(returned, structure)

        return left

    wrap_forward(module, wrapper)


def sum_gradient(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Identity; the gradient is summed over TP.

    Unlike Megatron's ``copy_to_tensor_model_parallel_region``, which sums in the very tensor it is handed: that
    of an addition's result is handed to the other operand, too.
    """
    return _SumGradient.apply(x, group)


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


class _Share(torch.autograd.Function):
    """Identity; of the gradient, which all ranks have whole, each takes an equal share."""

    @staticmethod
    def forward(ctx: Any, size: int, x: torch.Tensor) -> torch.Tensor:
        ctx.size = size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradients[0] / ctx.size


def _gather_for_region(x: torch.Tensor, group: Any) -> torch.Tensor:
    """[b, s / tp, h] -> [b, s, h]; the gradient is summed over TP and split again."""
    whole = gather_from_sequence_parallel_region(
        x.transpose(0, 1).contiguous(), tensor_parallel_output_grad=True, group=group
    )
    return whole.transpose(0, 1)


def _gather_contiguous(x: torch.Tensor, group: Any) -> torch.Tensor:
    return _gather_for_region(x, group).contiguous()


def split_sequence(layer: nn.Module, slot: Slot, group: Any) -> None:
    """The hidden state is split along the sequence as it enters this (first) layer, to [b, s / tp, h]."""

    def wrapper(forward: Forward) -> Forward:
        def entered(*args: Any, **kwargs: Any) -> Any:
            whole = slot.get(args, kwargs)
            hidden = scatter_to_sequence_parallel_region(whole.transpose(0, 1).contiguous(), group=group)
            args, kwargs = slot.put(hidden.transpose(0, 1), args, kwargs)
            return forward(*args, **kwargs)

        return entered

    wrap_forward(layer, wrapper)


def join_sequence(layer: nn.Module, slot: Slot, group: Any) -> None:
    """The hidden state is whole again as it leaves this (last) layer: [b, s / tp, h] -> [b, s, h].

    What follows is the same on all TP ranks, so the gradient is only split again, not summed.
    """

    def wrapper(forward: Forward) -> Forward:
        def left(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            hidden = gather_from_sequence_parallel_region(
                slot.result(output).transpose(0, 1).contiguous(),
                tensor_parallel_output_grad=False,
                group=group,
            )
            return slot.rewrap(output, hidden.transpose(0, 1))

        return left

    wrap_forward(layer, wrapper)
