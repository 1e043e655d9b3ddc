"""Cuts convolutions and batch norms in place over the TP group: class, attributes, hooks and names stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from torch import nn

from megasched.definition.images.convolutions import cut_axes, is_convolution
from megasched.layers.build_context import BuildContext
from megasched.layers.wrap import Forward, wrap_forward


def lower_channels(path: str, module: nn.Module, context: BuildContext, *, entered: bool) -> nn.Module:
    """Gives a convolution or a batch norm this rank's tensors and communication, and returns it.

    A column takes [b, in, places...] and returns [b, out / tp, places...] (or [b, out, places...] gathered). A row
    takes [b, in / tp, places...] and returns [b, out, places...]. A batch norm and a grouped convolution have this
    rank's channels of whatever they hold, and send nothing.

    Args:
        entered: a region around it already brings the input into TP.
    """
    plan = context.plan
    cut = plan.cuts[path]
    for name in cut_axes(module, cut).keys() | module._parameters.keys():
        _take_tensor(path, module, name, context)
    if cut == "channels":
        if is_convolution(module):
            module.groups //= context.size
        return module
    if cut == "column":
        call = _column(module, context.group, entered, path in plan.tp_facts.gather)
    else:
        scatter, overwritten = path in plan.tp_facts.scatter, path in plan.tp_facts.overwritten
        call = _row(module, context.group, scatter, overwritten)
    wrap_forward(module, call, node=cut)
    return module


def _take_tensor(path: str, module: nn.Module, name: str, context: BuildContext) -> None:
    """Puts this rank's part of a parameter or a buffer in its place."""
    held: Any = getattr(module, name)
    if held is None:
        return
    placement = context.plan.placement(path, name)
    if name in module._parameters:
        tied = context.made.get(placement.name)
        if tied is None and placement.sharded:
            tied = nn.Parameter(held.new_empty(context.plan.local_shape(placement)))
            context.fill(tied, placement, held)
        elif tied is None:
            context.fill(held, placement, held)
            return
        setattr(module, name, tied)
    else:
        module._buffers[name] = placement.shard(held, context.rank, context.size).clone()


def _column(module: nn.Module, group: Any, entered: bool, gathered: bool) -> Callable[..., torch.Tensor]:
    places = len(module.kernel_size)

    def column(forward: Forward, /, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not entered:
            input = copy_to_tensor_model_parallel_region(input, group=group)
        output = forward(input, *args, **kwargs)
        if gathered:
            output = _over_channels(gather_from_tensor_model_parallel_region, output, places, group)
        return output

    return column


def _row(module: nn.Module, group: Any, scatter: bool, overwritten: bool) -> Callable[..., torch.Tensor]:
    places = len(module.kernel_size)

    def row(forward: Forward, /, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if scatter:
            input = _over_channels(scatter_to_tensor_model_parallel_region, input, places, group)
        bias = module._parameters["bias"]
        module._parameters["bias"] = None  # it is added once, to the sum
        try:
            output = forward(input, *args, **kwargs)
        finally:
            module._parameters["bias"] = bias
        output = reduce_from_tensor_model_parallel_region(output, group=group)
        if bias is not None:
            return (output + bias.view(-1, *[1] * places)).to(output.dtype)  # autocast has not cast the bias
        return output.clone() if overwritten else output  # autograd forbids to change a custom function's view

    return row


def _over_channels(
    operation: Callable[..., torch.Tensor], x: torch.Tensor, places: int, group: Any
) -> torch.Tensor:
    """Applies an operation of Megatron's on the last dimension to the channels, before so many of places."""
    dim = x.dim() - 1 - places
    return operation(x.movedim(dim, -1), group=group).movedim(-1, dim).contiguous()
