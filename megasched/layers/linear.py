"""Defines linears over the TP group: Megatron's own layers, in HF's calling convention.

HF passes [b, s, h] and expects a tensor; Megatron's layers take [s, b, h] if they communicate along the sequence,
and return a tuple. Only sequence parallelism depends on which of s and b comes first, and there the transposes are
views.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    all_gather_last_dim_from_tensor_parallel_region,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import nn
from torch.nn import functional as F

from megasched.definition.linears import features
from megasched.layers.build_context import BuildContext
from megasched.layers.fused import biased_product
from megasched.layers.fused_columns import FusedColumns
from megasched.layers.regions import all_reduce_gradient
from megasched.layers.tokens import Tokens
from megasched.layers.wrap import takes_any_name
from megasched.plan.placement import Placement


def _without_extra_state(layer: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Takes out of a state dict what a hook of Megatron's has just put in (core/tensor_parallel/layers.py:1088).

    It is an empty entry for Transformer Engine; the definition's linear has none, and loads strictly.
    """
    if state.get(f"{prefix}_extra_state", layer) is None:
        del state[f"{prefix}_extra_state"]


class ColumnLinear(ColumnParallelLinear):
    """Computes ``ColumnParallelLinear`` of [b, s, in] and returns [b, s, out / tp] (or [b, s, out] gathered).

    Attributes:
        real_features: output features without padding; gathered output is cut to them.
        inside: gathered output stays inside a TP region, so that its gradient is summed over the ranks.
        overwritten: the definition changes the output in place, which autograd forbids for a view that a custom
            function made.
        fused_columns: the columns computed by one matrix product together with this one, if there are any.
        tokens: converts the shape of the input.
    """

    real_features: int | None = None
    inside: bool = False
    overwritten: bool = False
    fused_columns: FusedColumns | None = None
    tokens: Tokens
    # Megatron's has an empty entry for Transformer Engine in its state dict; the definition's has none.
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    @takes_any_name
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self._computed(x)
        return output.clone() if self.overwritten else output

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        return biased_product.linear(input, weight, **options)

    def _computed(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() not in (2, 3) and not self.sequence_parallel:  # Megatron's backward takes no other
            return _as_before(x, self._computed(x.reshape(-1, x.shape[-1])))
        if self.fused_columns is not None:
            output = self.fused_columns.output_of(self, x)
            if output is not None:
                return output
        if self.sequence_parallel:
            return self.tokens.as_before(super().forward(self.tokens.sequence_first(x).contiguous())[0], x)
        output = super().forward(x)[0]
        if self.inside:
            return all_gather_last_dim_from_tensor_parallel_region(output, group=self.tp_group)
        if self.gather_output and self.real_features is not None:
            output = output[..., : self.real_features]
        return output


class RowLinear(RowParallelLinear):
    """Computes ``RowParallelLinear`` of [b, s, in / tp] and returns [b, s, out] ([b, s / tp, out] under SP).

    Attributes:
        takes_part: the input is whole inside a TP region; this rank takes its part of it.
        overwritten: as above.
        inside: the output stays inside a TP region, so that its gradient is summed over the ranks, too.
        bias_in_product: the product is whole on this rank and adds the bias, which Megatron's forward then skips.
        tokens: as above.
    """

    takes_part: bool = False
    overwritten: bool = False
    inside: bool = False
    bias_in_product: bool = False
    tokens: Tokens

    get_extra_state = nn.Module.get_extra_state  # as above
    set_extra_state = nn.Module.set_extra_state

    @takes_any_name
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() not in (2, 3) and not self.sequence_parallel:  # as above
            return _as_before(x, self.forward(x.reshape(-1, x.shape[-1])))
        if self.takes_part:
            x = x.chunk(self.tp_group.size(), dim=-1)[self.tp_group.rank()]
        if self.sequence_parallel:
            output = self.tokens.as_before(super().forward(self.tokens.sequence_first(x))[0], x)
        else:
            output = super().forward(x)[0]
        if (dtype := biased_product.autocast_dtype(x)) is not None:
            output = output.to(dtype)  # Megatron has added a float32 bias
        if self.inside:
            output = all_reduce_gradient(output, self.tp_group)
        return output.clone() if self.overwritten else output

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, bias: None, **options: Any) -> torch.Tensor:
        return biased_product.linear(input, weight, self.bias if self.bias_in_product else bias, **options)


class ReplicatedHeadsLinear(nn.Module):
    """Computes some rows of a projection to k or v (or to q, k and v) that is whole on every rank.

    See ``megasched.plan.placement.ReplicatedHeads``.

    Attributes:
        rows: half-open ranges of output features that this rank computes.
        entered: a region around it has already brought the input into TP.
        split: converts the shape of the input if activations around it are split along the sequence.
    """

    def __init__(
        self, rows: Sequence[tuple[int, int]], group: Any, *, entered: bool, split: Tokens | None
    ) -> None:
        super().__init__()
        self.rows, self.group, self.entered, self.split = tuple(rows), group, entered, split
        self.weight: nn.Parameter
        self.bias: nn.Parameter | None

    @takes_any_name
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [b, s, in] ([b, s / tp, in] if it gathers the sequence) to [b, s, rows]."""
        if not self.entered and self.split is None:
            x = copy_to_tensor_model_parallel_region(x, group=self.group)
        elif not self.entered:
            part = self.split.sequence_first(x).contiguous()
            whole = gather_from_sequence_parallel_region(part, tensor_parallel_output_grad=True, group=self.group)
            x = self.split.as_before(whole, x)
        return F.linear(x, self._used(self.weight), None if self.bias is None else self._used(self.bias))

    def _used(self, whole: torch.Tensor) -> torch.Tensor:
        pieces = [whole[start:stop] for start, stop in self.rows]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def lower_linear(path: str, module: nn.Module, context: BuildContext, *, entered: bool) -> nn.Module:
    """Returns the layer of Megatron's that replaces an HF linear, filled with its values.

    Args:
        path: path of the module in the definition.
        module: ``nn.Linear`` or HF ``Conv1D``, real or on meta.
        entered: a region around it already brings the input into TP (see ``regions.py``).
    """
    plan = context.plan
    weight = plan.placement(path, "weight")
    in_features, out_features = features(module)
    bias = getattr(module, "bias", None) is not None
    split = plan.splits_sequence(path)
    if path in plan.replicated_heads:
        return _lower_replicated_heads(path, module, context, entered)
    tied = weight.name in context.made
    gathered, inside = path in plan.tp_facts.gather, path in plan.tp_facts.inside
    dtype = context.dtype(weight, module.weight)
    with context.making(module.weight):
        if plan.cuts[path] == "column":
            lowered: ColumnLinear | RowLinear = ColumnLinear(
                in_features,
                weight.padded or out_features,
                config=context.config_with(sequence_parallel=split and not entered, params_dtype=dtype),
                init_method=nn.init.zeros_,
                bias=bias,
                gather_output=gathered and not inside,
                disable_grad_reduce=entered,
                skip_weight_param_allocation=tied,
                tp_group=context.group,
            )
            lowered.inside = gathered and inside
            lowered.overwritten = path in plan.tp_facts.overwritten
            lowered.real_features = out_features if weight.padded else None
        else:
            stays = path in plan.tp_facts.rows_inside
            lowered = RowLinear(
                in_features,
                out_features,
                config=context.config_with(sequence_parallel=split and not stays, params_dtype=dtype),
                init_method=nn.init.zeros_,
                bias=bias,
                input_is_parallel=inside or path not in plan.tp_facts.scatter,
                skip_bias_add=bias and context.size == 1,
                tp_group=context.group,
            )
            lowered.takes_part, lowered.inside = inside, stays
            lowered.bias_in_product = lowered.skip_bias_add
            lowered.overwritten = path in plan.tp_facts.overwritten
    lowered.tokens = context.tokens
    lowered.register_load_state_dict_pre_hook(_without_extra_state)
    for name, held in module.named_parameters(recurse=False):
        context.fill_or_tie(lowered, name, plan.placement(path, name), held)
    return lowered


def _lower_replicated_heads(
    path: str, module: nn.Module, context: BuildContext, entered: bool
) -> ReplicatedHeadsLinear:
    plan = context.plan
    rows = plan.replicated_heads[path].rows(context.rank, context.size, features(module)[1])
    split = context.tokens if plan.splits_sequence(path) else None
    lowered = ReplicatedHeadsLinear(rows, context.group, entered=entered, split=split)
    lowered.register_parameter("bias", None)
    for name, held in module.named_parameters(recurse=False):
        make_parameter(lowered, name, plan.placement(path, name), held, context)
    return lowered


def _as_before(x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Returns features [tokens, out] as [..., out], in the leading shape of ``x`` [..., in]."""
    return output.view(*x.shape[:-1], output.shape[-1])


def make_parameter(
    owner: nn.Module, name: str, placement: Placement, held: nn.Parameter, context: BuildContext
) -> nn.Parameter:
    """Registers this rank's part of an HF parameter, filled with its values, and returns it."""
    dtype = context.dtype(placement, held)
    shape = context.plan.local_shape(placement)
    with context.making(held):
        owner.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype, device=context.device)))
    context.fill_or_tie(owner, name, placement, held)
    made: nn.Parameter = getattr(owner, name)
    return made
