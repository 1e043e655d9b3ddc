"""Defines linears over the TP group for 8-bit training, whose matrix product is Transformer Engine's.

``te.Linear`` computes a rank's local product; Megatron's own functions communicate, in the same places as in 16
bits (``linear.py``). So a region around several columns may already have gathered their input, which Megatron's
``TEColumnParallelLinear`` does not allow. Two optimisations are left out: gathering along the sequence in 8 bits,
and overlapping communication with the products. Megatron's own layers (level ``block``) have both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import nn

from megasched.layers.build_context import BuildContext
from megasched.layers.fused_columns import ProductOutput, SharedProduct, make_adjacent
from megasched.layers.linear import make_parameter
from megasched.layers.tokens import Tokens
from megasched.layers.wrap import takes_any_name


def te_linear() -> Any:
    """Returns Transformer Engine's linear, imported only when needed."""
    from transformer_engine.pytorch import Linear

    return Linear


class TeProduct(SharedProduct):
    """Computes one matrix product of Transformer Engine's, for a linear or for columns with the same input.

    ``te.Linear`` takes a weight in several parameters (``parameters_split``), which it reads as one matrix without
    a copy if they are adjacent in memory. These are the members' own parameters, so that the module tree and its
    names stay the definition's and contain nothing of the 8-bit state.

    Args:
        members: ``TeLinear``, in the order of their calls.

    Attributes:
        first: the weights have changed since the last call and must be quantized again.
    """

    def __init__(self, members: Sequence[TeLinear]) -> None:
        super().__init__()
        self.members = tuple(members)
        self.first = True
        one, biased = members[0], members[0].adds_bias and members[0].bias is not None
        make_adjacent([member.weight for member in members])
        if biased:
            make_adjacent([member.bias for member in members])
        self._order = tuple(reversed(self.members))  # in which their weights lie in memory
        self._sizes = [member.weight.shape[0] for member in self._order]
        names = [f"part{number}" for number in range(len(members))]
        self._linear = te_linear()(
            one.weight.shape[1],
            sum(self._sizes),
            bias=biased,
            parameters_split=dict(zip(names, self._sizes, strict=True)),
            params_dtype=one.weight.dtype,
            device=one.weight.device,
            init_method=nn.init.zeros_,
        )
        for name, member in zip(names, self._order, strict=True):
            setattr(self._linear, f"{name}_weight", member.weight)
            if biased:
                setattr(self._linear, f"{name}_bias", member.bias)

    def _product(self, x: torch.Tensor) -> ProductOutput:
        """Maps the input of the members to their outputs, [..., all of their out / tp]."""
        one = self.members[0]
        self._linear.train(one.training)
        output = self._linear(one.take(x), is_first_microbatch=self.first)
        self.first = False
        return ProductOutput(output, self._order, self._sizes)


class TeLinear(nn.Module):
    """Holds the common parts of columns and rows.

    Attributes:
        weight: [out, in] of this rank.
        fused_columns: computes the product, perhaps together with that of other columns.
        adds_bias: the product adds the bias.
        group: the TP group.
        split: activations around it are split along the sequence.
        tokens: converts the shape of its input.
    """

    adds_bias = False
    weight: nn.Parameter
    bias: nn.Parameter | None
    fused_columns: TeProduct

    def __init__(self, group: Any, split: bool) -> None:
        super().__init__()
        self.group, self.split, self.tokens = group, split, Tokens()
        self.register_parameter("bias", None)

    @property
    def is_first_microbatch(self) -> bool:
        """Returns whether this is the first micro-batch of a step; Megatron sets it before that one.

        See ``set_is_first_microbatch`` in megatron/core/transformer/module.py.
        """
        return self.fused_columns.first

    @is_first_microbatch.setter
    def is_first_microbatch(self, first: bool) -> None:
        self.fused_columns.first = first

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the input of the local product."""
        raise NotImplementedError


class TeColumnLinear(TeLinear):
    """Computes [b, s, out / tp], or [b, s, out] gathered, from [b, s, in].

    Its input is [b, s / tp, in] if it gathers the sequence.

    Attributes:
        entered: a region around it has already brought the input into TP.
        gather_output: return the whole output.
    """

    adds_bias = True

    def __init__(self, group: Any, split: bool, entered: bool, gather_output: bool) -> None:
        super().__init__(group, split)
        self.entered, self.gather_output = entered, gather_output

    def take(self, x: torch.Tensor) -> torch.Tensor:
        if self.entered:
            return x
        if not self.split:
            return copy_to_tensor_model_parallel_region(x, group=self.group)
        whole = gather_from_sequence_parallel_region(
            self.tokens.sequence_first(x).contiguous(), tensor_parallel_output_grad=True, group=self.group
        )
        return self.tokens.as_before(whole, x)

    @takes_any_name
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.fused_columns.output_of(self, x)
        return gather_from_tensor_model_parallel_region(output, group=self.group) if self.gather_output else output


class TeRowLinear(TeLinear):
    """Computes [b, s, out] from [b, s, in / tp], or from its part of [b, s, in].

    Under sequence parallelism its output is [b, s / tp, out].

    Attributes:
        input_is_parallel: the input is this rank's part already.
    """

    def __init__(self, group: Any, split: bool, input_is_parallel: bool) -> None:
        super().__init__(group, split)
        self.input_is_parallel = input_is_parallel

    def take(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.input_is_parallel else scatter_to_tensor_model_parallel_region(x, group=self.group)

    @takes_any_name
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = self.fused_columns.output_of(self, x)
        if self.split:
            first = self.tokens.sequence_first(part).contiguous()
            output = reduce_scatter_to_sequence_parallel_region(first, group=self.group)
            output = self.tokens.as_before(output, part)
        else:
            output = reduce_from_tensor_model_parallel_region(part, group=self.group)
        return output if self.bias is None else output + self.bias


def lower_te_linear(path: str, module: nn.Module, context: BuildContext, *, entered: bool) -> TeLinear:
    """Returns the layer that replaces an HF linear in 8-bit training, filled with its values.

    Its product (``fused_columns``) is made later, when the other linears that share it are determined.

    Args:
        path: path of the module in the definition.
        module: ``nn.Linear`` or HF ``Conv1D``, on meta.
        entered: a region around it already brings the input into TP (see ``regions.py``).
    """
    plan = context.plan
    column, split = plan.cuts[path] == "column", plan.splits_sequence(path)
    lowered: TeLinear
    if column:
        lowered = TeColumnLinear(context.group, split, entered, path in plan.tp_facts.gather)
    else:
        lowered = TeRowLinear(context.group, split, path not in plan.tp_facts.scatter)
    lowered.tokens = context.tokens
    for name, held in module.named_parameters(recurse=False):
        parameter = make_parameter(lowered, name, plan.placement(path, name), held, context)
        parameter.allreduce = True
        if name == "weight" or column:
            set_tensor_model_parallel_attributes(parameter, True, 0 if column else 1, 1)
    return lowered
