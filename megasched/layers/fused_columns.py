"""Computes several column linears that read one tensor by one matrix product (q, k and v; gate and up).

Modules, parameters and their names stay. Only the storage of the weights changes: they are adjacent in memory, so
that together they are one matrix without a copy. The first linear that is called computes the outputs of all; the
others return theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from megasched.layers.fused import biased_product
from megasched.layers.wrap import wait_for_parameters


class _Join(torch.autograd.Function):
    """Joins parameters that are adjacent in memory to one tensor; the gradient is returned in parts.

    Where the trainer's buffers are adjacent, too, the gradient is added to ``main_grad`` here, by one kernel for
    all; a kernel that has done so before hands on none. Then each parameter is marked so and gets a placeholder,
    as in Megatron, for the hooks that wait for a gradient (``core/tensor_parallel/layers.py:581``).
    """

    @staticmethod
    def forward(ctx: Any, *parts: nn.Parameter) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.parts = parts
        return _whole(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        (gradient,) = gradients
        if gradient is not None:
            buffers = [getattr(part, "main_grad", None) for part in ctx.parts]
            if not _adjacent(buffers):
                return gradient.split([part.shape[0] for part in ctx.parts])
            _whole(buffers).add_(gradient)
        for part in ctx.parts:
            part.grad_added_to_main_grad = True
        return tuple(
            (torch.zeros_like if getattr(part, "zero_out_wgrad", False) else torch.empty_like)(part)
            for part in ctx.parts
        )


@dataclass(frozen=True)
class ProductOutput:
    """Holds what one product computes for several linears.

    Attributes:
        output: [b, s, all features]
        order: the linears in the order of their features.
        sizes: features of each.
    """

    output: torch.Tensor
    order: Sequence[Any]
    sizes: Sequence[int]

    def by_linear(self) -> dict[int, torch.Tensor]:
        """Returns the output of each linear by its id."""
        if len(self.order) == 1:
            return {id(self.order[0]): self.output}
        parts = self.output.split(list(self.sizes), dim=-1)
        return {id(member): part for member, part in zip(self.order, parts, strict=True)}


# Input, its version, whether gradients are on, and the members' parameters.
_Source = tuple[torch.Tensor, int, bool, tuple[tuple[int, int], ...]]


class SharedProduct:
    """Computes linears with the same input at the first call.

    It is not a module, so that the module tree stays the definition's.
    """

    members: tuple[Any, ...]

    def __init__(self) -> None:
        self._source: _Source | None = None
        self._waiting: dict[int, torch.Tensor] = {}

    def output_of(self, member: Any, x: torch.Tensor) -> torch.Tensor | None:
        """Returns the output of one member, or None if the members must compute their outputs separately.

        Args:
            x: [b, s, in] ([b, s / tp, in] if the member gathers the sequence), or flattened tokens.
        """
        source = (x, _version(x), torch.is_grad_enabled(), self._weights())
        if not self._handed_out_for(source) or id(member) not in self._waiting:
            outputs = self.output(x)
            if outputs is None:
                self._source = None
                return None
            self._source, self._waiting = source, outputs.by_linear()
        output = self._waiting.pop(id(member))
        if not self._waiting:
            self._source = None  # all are handed out: nothing is kept alive
        return output

    def _weights(self) -> tuple[tuple[int, int], ...]:
        """Returns where the parameters of the members lie and their versions, by which changed ones are told."""
        held = [tensor for member in self.members for tensor in (member.weight, member.bias) if tensor is not None]
        return tuple((tensor.data_ptr(), _version(tensor)) for tensor in held)

    def output(self, x: torch.Tensor) -> ProductOutput | None:
        """Returns what all members make of ``x``; None if they can't be computed together."""
        for member in self.members:  # a call of one waits for its own parameters alone
            wait_for_parameters(member)
        return self._product(x)

    def _product(self, x: torch.Tensor) -> ProductOutput | None:
        raise NotImplementedError

    def _handed_out_for(self, source: _Source) -> bool:
        return self._source is not None and self._source[0] is source[0] and self._source[1:] == source[1:]


class FusedColumns(SharedProduct):
    """Computes columns by one matrix product of torch's.

    Args:
        members: Megatron's ``ColumnParallelLinear``; all have a bias or none has, and none gathers its output.
    """

    def __init__(self, members: Sequence[Any]) -> None:
        super().__init__()
        self.members = tuple(members)
        make_adjacent([member.weight for member in members])
        if members[0].bias is not None:
            make_adjacent([member.bias for member in members])

    def _product(self, x: torch.Tensor) -> ProductOutput | None:
        first = self.members[0]
        order = sorted(self.members, key=lambda member: member.weight.data_ptr())
        weights = [member.weight for member in order]
        biases = [member.bias for member in order if member.bias is not None]
        trained = {tensor.requires_grad for tensor in (*weights, *biases)}
        if len(trained) > 1 or not _adjacent(weights) or not _adjacent(biases):
            return None
        weight = _Join.apply(*weights)
        added = first.gradient_accumulation_fusion and hasattr(weights[0], "main_grad")
        if added:
            gradients = [weight.main_grad for weight in weights]
            if not _adjacent(gradients):
                return None
            weight.main_grad = _whole(gradients)
        split = first.sequence_parallel
        output = biased_product.linear(
            first.tokens.sequence_first(x).contiguous() if split else x,
            weight,
            _Join.apply(*biases) if biases else None,
            gradient_accumulation_fusion=added,
            allreduce_dgrad=first.allreduce_dgrad,
            sequence_parallel=split,
            tp_group=first.tp_group,
        )
        output = first.tokens.as_before(output, x) if split else output
        return ProductOutput(output, order, [weight.shape[0] for weight in weights])


def _version(tensor: torch.Tensor) -> int:
    """Returns how often a tensor was changed, which inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version


def make_adjacent(parameters: Sequence[nn.Parameter]) -> None:
    """Moves parameters into one block of memory, the last one first; parameters on meta stay there.

    That is the order of Megatron's buffers (``core/distributed/param_and_grad_buffer.py``).
    """
    if any(parameter.is_meta for parameter in parameters):
        return
    order = list(reversed(parameters))
    whole = torch.cat([parameter.detach() for parameter in order])
    for parameter, part in zip(order, whole.split([p.shape[0] for p in order]), strict=True):
        parameter.data = part


def _whole(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns one tensor over the memory of adjacent ones, listed in the order of their addresses."""
    first = parts[0].detach()
    return first.as_strided((sum(p.shape[0] for p in parts), *first.shape[1:]), first.stride())


def _adjacent(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Returns whether each tensor begins where the previous one ends, in one storage (a single one does).

    Without one of them (None) they are not.
    """
    if any(tensor is None for tensor in tensors):
        return False
    for before, after in pairwise(tensors):
        if before.untyped_storage().data_ptr() != after.untyped_storage().data_ptr():
            return False
        if not before.is_contiguous() or before.stride() != after.stride() or before.dtype != after.dtype:
            return False
        if before.storage_offset() + before.numel() != after.storage_offset():
            return False
    return True
