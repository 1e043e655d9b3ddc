"""Where activations change hands between whole, split along the sequence, and taken over to TP.

Everything here wraps ``module.forward`` (``wrap.py``).
"""

from __future__ import annotations

import functools
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


def enter_region(module: nn.Module, slot: int | str, group: Any, split: bool) -> None:
    """Takes the argument at ``slot`` over to TP once, for all column linears inside.

    Forward: identity, or all-gather along the sequence. Backward: all-reduce, or reduce-scatter. The
    columns inside then reduce nothing themselves.
    """
    transfer = functools.partial(
        _gather_for_region if split else copy_to_tensor_model_parallel_region, group=group
    )
    # In a graph of a module around this one it stays a call: a trace would lose its backward.
    take = functools.partial(opaque.call, "enter_region", transfer)

    def wrapper(forward: Forward) -> Forward:
        def entered(*args: Any, **kwargs: Any) -> Any:
            if isinstance(slot, int):
                args = (*args[:slot], take(args[slot]), *args[slot + 1 :])
            else:
                kwargs = {**kwargs, slot: take(kwargs[slot])}
            return forward(*args, **kwargs)

        return entered

    wrap_forward(module, wrapper)


def _gather_for_region(x: torch.Tensor, group: Any) -> torch.Tensor:
    """[b, s / tp, h] -> [b, s, h]; the gradient is summed over TP and split again."""
    whole = gather_from_sequence_parallel_region(
        x.transpose(0, 1).contiguous(), tensor_parallel_output_grad=True, group=group
    )
    return whole.transpose(0, 1)


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
