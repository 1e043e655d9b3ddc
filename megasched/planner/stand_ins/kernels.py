"""Stands in for Transformer Engine's modules and Megatron's fused kernels on a GPU.

A plan runs stages on fake tensors of a CPU, where other kernels are: norms and activations spelled out, keys of
all context parallel ranks gathered, no 8 bits. The stand-ins take their places. They compute nothing, but they
keep for the backward pass, read, write and send what the kernels of a GPU do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from megasched.analysis.attention_flops import attended, attention_flops
from megasched.planner.measure.work import behind_products
from megasched.planner.stand_ins.fake_kernels import Shape, add_product, kernel, like, product


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed, scale = kernel([x, weight], like(x), (x.shape[:-1], torch.float32))
        ctx.save_for_backward(x, weight, scale)
        return normed

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        return tuple(kernel([gradient, x, weight, scale], like(x), like(weight)))


def rms_norm(x: torch.Tensor, shape: Any, weight: torch.Tensor | None = None, eps: float | None = None) -> Any:
    """Stands in for ``F.rms_norm``."""
    if weight is None or not isinstance(x, FakeTensor):
        return torch.rms_norm(x, shape, weight, eps)
    return _Norm.apply(x, weight)


def compiled_norm(module: nn.Module, x: torch.Tensor) -> Any:
    """Stands in for ``compiled_norm`` of megasched/layers/fused/norms.py."""
    return _Norm.apply(x, module.weight) if isinstance(x, FakeTensor) else type(module).forward(module, x)


def zero_centered_rms_norm(self: Any, x: torch.Tensor) -> Any:
    """Stands in for ``ZeroCenteredRMSNorm.forward``: Transformer Engine's kernel adds the 1."""
    return rms_norm(x, self.normalized_shape, self.weight, self.eps)


def zero_centered_layer_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Stands in for ``ZeroCenteredLayerNorm.forward``: Transformer Engine's kernel adds the 1."""
    return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class _Pointwise(torch.autograd.Function):
    """Stands in for one kernel each way, which keeps its inputs, or nothing; it makes the dtype of the first."""

    @staticmethod
    def forward(ctx: Any, shape: Shape, keeps: bool, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.made = [like(x) for x in inputs]
        ctx.save_for_backward(*(inputs if keeps else ()))
        return kernel(inputs, (shape, inputs[0].dtype))[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, None, *kernel([gradient, *ctx.saved_tensors], *ctx.made)


def swiglu(x: torch.Tensor, bias: torch.Tensor | None, *args: Any) -> Any:
    """Stands in for ``bias_swiglu_impl`` of megatron/core/fusions/fused_bias_swiglu.py, and its like.

    Its like for GELU, and ``GatedActivation`` of megasched/layers/fused/gated_mlp.py, whose code is compiled.
    """
    return _Pointwise.apply((*x.shape[:-1], x.shape[-1] // 2), True, x)


def weighted_swiglu(x: torch.Tensor, weights: torch.Tensor) -> Any:
    """Stands in for Megatron's fused kernel that multiplies gate and up, times a weight of each token."""
    return _Pointwise.apply((*x.shape[:-1], x.shape[-1] // 2), True, x, weights)


def gelu(x: torch.Tensor, bias: torch.Tensor) -> Any:
    """Stands in for ``bias_gelu_impl`` of megatron/core/fusions/fused_bias_gelu.py."""
    return _Pointwise.apply(x.shape, True, x)


def rotary(t: torch.Tensor, freqs: torch.Tensor, **options: Any) -> Any:
    """Stands in for Transformer Engine's fused rotary embedding."""
    return _Pointwise.apply(t.shape, False, t)


def weighted_gate(module: Any, states: torch.Tensor, weights: torch.Tensor) -> Any:
    """Stands in for ``weighted_gate`` of megasched/layers/fused/experts.py."""
    width = states.shape[-1] // (2 if module.has_gate else 1)
    return _Pointwise.apply((states.shape[0], width), True, states, weights)


def sum_rows(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Stands in for ``sum_rows`` of megasched/layers/fused/pairs.py."""
    return kernel([x, places], ((places.shape[0], x.shape[1]), x.dtype))[0]


class _Attention(torch.autograd.Function):
    """Stands in for fused attention, which keeps its inputs, its output and a number for each query.

    Keys and values of other context parallel ranks pass while it computes.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pairs: float, group: Any
    ) -> torch.Tensor:
        exchange([key, value], group)
        shape = (*query.shape[:-1], value.shape[-1])
        output, sums = kernel(
            [query, key, value],
            (shape, query.dtype),
            (query.shape[:-1], torch.float32),
            flops=attention_flops(pairs, query.shape[-1], value.shape[-1]),
        )
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.pairs, ctx.group = pairs, group
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        query, key, value, output, sums = ctx.saved_tensors
        exchange([key, value, key, value], ctx.group)
        flops = attention_flops(ctx.pairs, query.shape[-1], value.shape[-1], backward=True)
        made = kernel(
            [gradient, query, key, value, output, sums], like(query), like(key), like(value), flops=flops
        )
        return *made, None, None


def exchange(tensors: Sequence[torch.Tensor], group: Any) -> None:
    """Passes tensors through all ranks of a group while something else is computed."""
    if group is None or group.size() == 1:
        return
    for tensor in tensors:
        whole = tensor.new_empty((tensor.shape[0] * group.size(), *tensor.shape[1:]))
        with behind_products():
            torch.distributed.all_gather_into_tensor(whole, tensor.contiguous(), group=group)


def attended_on_rank(queries: int, keys: int, causal: bool, window: int | None, parts: int) -> float:
    """Returns the pairs of a query and a key that it attends to, in one head on one rank.

    Both are of a ``parts``-th of the sequence, of which each rank has as much work as any other.
    """
    return attended(queries * parts, keys * parts, causal, window) / parts


def as_taken(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """Returns q, k and v as Transformer Engine takes them: of views, those of one tensor of all three alone.

    Else it copies what is a view (``get_qkv_layout``), and nothing holds the product of which that was a part.
    """
    if len({tensor.untyped_storage()._cdata for tensor in tensors}) == 1:
        return tensors
    return [tensor.contiguous() for tensor in tensors]


def te_core(
    core: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool,
    window: tuple[int, int],
    **options: Any,
) -> Any:
    """Stands in for ``TeCore.__call__`` of megasched/layers/te/attention.py; tensors are [b, heads, s, d]."""
    group = None if core.context is None else core.context.cp_group
    seen = None if window[0] < 0 else window[0] + 1
    pairs = attended_on_rank(query.shape[2], key.shape[2], causal, seen, 1 if group is None else core.context.size)
    inputs = as_taken(*(tensor.transpose(1, 2) for tensor in (query, key, value)))
    return _Attention.apply(*inputs, query.shape[0] * query.shape[1] * pairs, group).transpose(1, 2)


def capped_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, left: int, **options: Any
) -> torch.Tensor:
    """Stands in for ``capped_attention`` of megasched/layers/fused/capped_attention.py."""
    pairs = attended(query.shape[2], key.shape[2], True, None if left < 0 else left + 1)
    return _Attention.apply(query, key, value, query.shape[0] * query.shape[1] * pairs, None)


def block_core(
    core: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any
) -> Any:
    """Stands in for ``CoreAttention.forward`` of layers/megatron/core_attention.py; all are [s, b, heads, d]."""
    group, parts = (None, 1) if core.ranks is None else (core.ranks.group, core.ranks.zigzag.size)
    pairs = attended_on_rank(query.shape[0], key.shape[0], True, core.window, parts)
    inputs = as_taken(query, key, value)
    output = _Attention.apply(*inputs, query.shape[1] * query.shape[2] * pairs, group)
    return output.flatten(2)


class _Linear(torch.autograd.Function):
    """Stands in for Megatron's linear over TP; with a recipe, products are in 8 bits as Transformer Engine's."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        split: bool,
        reduces: bool,
        group: Any,
        recipe: str | None,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        used, kept = (x, x) if recipe is None else quantize(x, recipe)
        ctx.save_for_backward(kept)
        ctx.weights, ctx.biased = weights, bias is not None
        ctx.split, ctx.reduces, ctx.group, ctx.recipe = split, reduces, group, recipe
        whole = gather(used, group) if split else used
        features = sum(weight.shape[0] for weight in weights)
        output = product(whole, weights[0], (*whole.shape[:-1], features), whole.shape[-1], x.dtype)
        return output if bias is None else kernel([output, bias], like(output))[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (kept,) = ctx.saved_tensors
        weight, features = ctx.weights[0], gradient.shape[-1]
        used, again = (gradient, gradient) if ctx.recipe is None else quantize(gradient, ctx.recipe)
        with behind_products():
            whole = gather(kept, ctx.group) if ctx.split else kept
        of_input = product(used, weight, whole.shape, features, gradient.dtype)
        tokens = math.prod(whole.shape[:-1])
        with behind_products():
            if ctx.split:
                of_input = scatter(of_input, ctx.group)
            elif ctx.reduces:
                torch.distributed.all_reduce(of_input, group=ctx.group)
        add_product(again, whole, (features, whole.shape[-1]), tokens)
        of_bias = kernel([gradient], ((features,), gradient.dtype))[0] if ctx.biased else None
        return of_input, of_bias, None, None, None, None, *(None for _ in ctx.weights)


def quantize(x: torch.Tensor, recipe: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a tensor in 8 bits by rows and by columns, of which a product along either takes one.

    The scale of the whole tensor is found before (tensorwise), is known (delayed), or is that of a block.
    """
    reads = 2 if recipe == "tensorwise" else 1
    rows, columns = kernel([x] * reads, (x.shape, torch.uint8), (x.shape, torch.uint8))
    return rows, columns


def gather(part: torch.Tensor, group: Any) -> torch.Tensor:
    """Gathers the ranks' parts [s / tp, ...] to [s, ...]."""
    whole = part.new_empty((part.shape[0] * group.size(), *part.shape[1:]))
    torch.distributed.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return whole


def scatter(whole: torch.Tensor, group: Any) -> torch.Tensor:
    """Sums [s, ...] over the ranks and scatters it to [s / tp, ...]."""
    part = whole.new_empty((whole.shape[0] // group.size(), *whole.shape[1:]))
    torch.distributed.reduce_scatter_tensor(part, whole, group=group)
    return part


def no_context(*args: Any) -> Any:
    """Stands in for Megatron's 8-bit context: weights themselves tell (``mark_8_bits``), also in a recompute."""
    return nullcontext()


# Marks a weight whose products are in 8 bits.
EIGHT_BITS = "megasched_in_8_bits"


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    *args: Any,
    tp_group: Any = None,
    recipe: str | None = None,
    **options: Any,
) -> Any:
    """Stands in for Megatron's ``linear_with_grad_accumulation_and_async_allreduce`` (tensor_parallel/layers.py).

    Args:
        recipe: recipe of weights that are in 8 bits.
    """
    eight = recipe if getattr(weight, EIGHT_BITS, False) else None
    return _Linear.apply(x, bias, sequence_parallel, allreduce_dgrad, tp_group, eight, weight)


def mark_8_bits(layer: nn.Module) -> None:
    """Marks the weights of Megatron's linears in a layer, so that their products are computed in 8 bits."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    for module in layer.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            setattr(module.weight, EIGHT_BITS, True)


class TeLinear(nn.Module):
    """Stands in for ``transformer_engine.pytorch.Linear``, with weights in several parameters."""

    def __init__(
        self, *sizes: int, recipe: str, parameters_split: dict[str, int], bias: bool, **options: Any
    ) -> None:
        super().__init__()
        self.recipe, self.names, self.biased = recipe, list(parameters_split), bias

    def forward(self, x: torch.Tensor, **options: Any) -> Any:
        weights = [getattr(self, f"{name}_weight") for name in self.names]
        bias = getattr(self, f"{self.names[0]}_bias") if self.biased else None
        return _Linear.apply(x, bias, False, False, None, self.recipe, *weights)


def stand_ins(recipe: str | None) -> dict[str, Callable[..., Any]]:
    """Maps each target to the function that stands in its place.

    Args:
        recipe: recipe of 8-bit training, as Megatron's ``--fp8-recipe`` names it.
    """
    megatrons_linear = partial(linear, recipe=recipe)
    return {
        "torch.nn.functional:rms_norm": rms_norm,
        "megasched.layers.megatron.layer_spec:ZeroCenteredRMSNorm.forward": zero_centered_rms_norm,
        "megasched.layers.megatron.layer_spec:ZeroCenteredLayerNorm.forward": zero_centered_layer_norm,
        "megasched.layers.fused.gated_mlp:GatedActivation.apply": swiglu,
        "megatron.core.transformer.mlp:bias_swiglu_impl": swiglu,
        "megatron.core.transformer.mlp:bias_geglu_impl": swiglu,
        "megatron.core.transformer.mlp:bias_gelu_impl": gelu,
        "megatron.core.models.common.embeddings.rope_utils:fused_apply_rotary_pos_emb": rotary,
        "megatron.core.tensor_parallel.layers:linear_with_grad_accumulation_and_async_allreduce": megatrons_linear,
        "megasched.layers.fused.biased_product:linear": megatrons_linear,
        "megasched.layers.fused.experts:apply_gate": lambda module, gate_up: swiglu(gate_up, None),
        "megasched.layers.fused.experts:weighted_gate": weighted_gate,
        "megasched.layers.fused.pairs:sum_rows": sum_rows,
        "megasched.layers.fused.norms:compiled_norm": compiled_norm,
        "megasched.layers.fused.norms:zero_centered_norm": lambda module, *others: compiled_norm(
            module, others[-1]
        ),
        "megasched.layers.fused.capped_attention:takes": lambda *tensors: True,
        "megasched.layers.fused.capped_attention:capped_attention": capped_attention,
        "megatron.core.fp8_utils:get_fp8_context": no_context,
        "megasched.lowering.lower:uses_transformer_engine": lambda device: True,
        "megasched.layers.te.attention:TeCore.__call__": te_core,
        "megasched.layers.megatron.core_attention:CoreAttention.forward": block_core,
        "megasched.layers.te.linear:te_linear": lambda: partial(TeLinear, recipe=recipe or ""),
    }
