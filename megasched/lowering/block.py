"""A decoder layer computed by Megatron's own ``TransformerLayer``, filled with the definition's weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_submodules,
    get_gpt_layer_with_transformer_engine_submodules,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import nn
from torch.nn import functional as F

from megasched.errors import Problem, ScheduleError
from megasched.lowering.attention import fused_attention
from megasched.lowering.attention_te import uses_transformer_engine
from megasched.lowering.block_parameters import assemblies, has_bias, mixture_in
from megasched.lowering.context import Context
from megasched.lowering.context_parallel import ContextParallel, comm_type
from megasched.lowering.filling import fill_module
from megasched.lowering.latent_attention import LatentAngles, latent_config, settle_latent_attention
from megasched.lowering.mixture import mixture_config, note_correction
from megasched.lowering.packed import packed_mask
from megasched.lowering.rng import fork_rng
from megasched.lowering.zigzag import causal_mask
from megasched.roles import Block, Roles
from megasched.trial.dims import Along
from megasched.trial.slot import Slot

Angles = Callable[[int, torch.device], torch.Tensor]


class MegatronLayer(nn.Module):
    """Takes a decoder layer's place: its call and what it returns are the definition's.

    Args:
        layer: Megatron's, which takes and returns [s (/ tp under SP), b, h].
        slot: where the hidden state stands in the definition's call.
        angles: (device, length) -> rotary angles [s, 1, 1, head_dim] of this rank, float32; None where the layer
            is given none.
        parts: in how many parts the hidden state is split along the sequence by sequence parallelism.
    """

    def __init__(
        self,
        layer: TransformerLayer,
        slot: Slot,
        angles: Callable[[torch.device, int], torch.Tensor] | None,
        parts: int,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.slot, self.angles, self.parts = slot, angles, parts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The hidden state [b, s (/ tp), h] among the arguments goes through the layer. Of the others, the bounds
        of packed sequences count; masks and positions say nothing that Megatron's causal layer does not know."""
        hidden, packed = self.slot.get(args, kwargs), _packed_params(kwargs)
        shape = hidden.shape
        if packed is not None:  # Megatron's layer knows one row of packed sequences
            hidden = hidden.flatten(0, 1)[None]
        hidden = hidden.transpose(0, 1).contiguous()
        length = hidden.shape[0] * self.parts
        # Of packed sequences, attention sees the distance of two tokens alone, wherever Megatron counts from.
        angles = None if self.angles is None else self.angles(hidden.device, length)
        try:
            output, _ = self.layer(hidden, attention_mask=None, rotary_pos_emb=angles, packed_seq_params=packed)
        finally:
            # A recompute ends within the layer, as soon as all is there again. Megatron's layer would keep its
            # hidden state then, and with it all that was recomputed, until it is called again.
            self.layer.mlp_norm_manager = None
        return self.slot.wrap(output.transpose(0, 1).reshape(shape))


def _packed_params(arguments: dict[str, Any]) -> PackedSeqParams | None:
    """Bounds of packed sequences among a layer's arguments, under Megatron's names; None where there are none."""
    bounds = arguments.get("cu_seq_lens_q")
    if bounds is None:
        return None
    longest = arguments["max_length_q"]
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def lower_block(
    path: str, old: nn.Module, model: nn.Module, roles: Roles, angles: Angles, context: Context
) -> MegatronLayer:
    """Megatron's layer in the place of the definition's layer at ``path``, its values filled in.

    Args:
        angles: of ``rotary_angles``, the same for all layers.

    Raises:
        RuntimeError: Megatron's layer has a parameter that no HF tensor is known for, or the other way round.
    """
    plan, structure, block = context.plan, context.plan.structure, roles.block
    assert structure is not None
    assert isinstance(block, Block)
    index = structure.index_of(path)
    assert index is not None
    config, groups = _config(path, index, roles, context), ProcessGroupCollection.use_mpu_process_groups()
    parts = context.size if config.sequence_parallel else 1
    ranks = context.context_parallel
    layer = TransformerLayer(
        config,
        _submodules(path, index, config, context, mlp_bias=has_bias(plan, path, block.mlp_inputs[0])),
        layer_number=index + 1,
        pg_collection=groups,
        add_layer_offset=False,
    )
    if block.latent is not None:
        own = LatentAngles(partial(_own_angles, angles, ranks, context.device), parts, block.latent.factor)
        te = uses_transformer_engine(context.device)
        settle_latent_attention(layer.self_attention, block.latent, config, own, context.device, te)
    fill_module(path, layer, assemblies(plan, path, roles, groups.ep.rank()), model, context)
    mixture = mixture_in(plan, path, roles)
    if mixture is not None:
        note_correction(f"{path}.layer.mlp", path, mixture, context)
    rotated = block.latent is None and (not block.rotated or block.rotated[index])
    given = partial(_own_angles, angles, ranks) if rotated else None
    new = MegatronLayer(layer, structure.slot, given, parts)
    for name, value in vars(old).items():  # the model may read them off its layers (attention_type)
        if isinstance(value, str | int | float) and name not in vars(new):
            setattr(new, name, value)
    return new


def rotary_angles(rotary: nn.Module) -> Angles:
    """Angles of every position, from the definition's own frequencies; computed once for a length."""
    frequencies: torch.Tensor = rotary.get_buffer("inv_freq")

    @lru_cache(maxsize=2)
    def angles(length: int, device: torch.device) -> torch.Tensor:
        positions = torch.arange(length, device=device, dtype=torch.float32)
        half = torch.outer(positions, frequencies.to(device, torch.float32))
        return torch.cat((half, half), dim=-1)[:, None, None, :]

    return angles


def _own_angles(angles: Angles, ranks: ContextParallel | None, device: torch.device, length: int) -> torch.Tensor:
    """Those of the part of the sequence that this rank has, of so many tokens; all of it without context
    parallelism."""
    if ranks is None:
        return angles(length, device)
    return ranks.zigzag.own_part(angles(length * ranks.zigzag.size, device), Along(0))


def _config(path: str, index: int, roles: Roles, context: Context) -> TransformerConfig:
    """The trainer's config with what the definition says of layer number ``index``."""
    plan, block, mixture = context.plan, roles.block, mixture_in(context.plan, path, roles)
    assert isinstance(block, Block)
    window = block.windows[index] if block.windows else None
    if mixture is None:
        width = plan.placement(f"{path}.{block.down}", "weight").shape[1]
        mlp = {"ffn_hidden_size": width, "num_moe_experts": None, "moe_ffn_hidden_size": None}
        mlp |= {"gated_linear_unit": True, "activation_func": F.silu}
    else:
        mlp = mixture_config(path, mixture, context)
    latent = block.latent
    attention = {"qk_layernorm": bool(block.q_norm)} if latent is None else latent_config(latent)
    # Without what a run on a GPU alone can do, the flags of the trainer count (fusions, recompute, precision).
    config = context.config_with(
        **mlp | attention | {"add_bias_linear": has_bias(plan, path, block.out)},
        num_attention_heads=block.heads,
        num_query_groups=block.groups,
        kv_channels=block.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=block.eps,
        window_size=None if window is None else (window - 1, 0),  # HF counts the token itself
        add_qkv_bias=has_bias(plan, path, block.attention_inputs[0]),
        hidden_dropout=block.hidden_dropout,
        attention_dropout=block.attention_dropout,
        init_method=nn.init.zeros_,
        output_layer_init_method=nn.init.zeros_,
    )
    assert isinstance(config, TransformerConfig)
    return config


def _submodules(
    path: str, index: int, config: TransformerConfig, context: Context, mlp_bias: bool
) -> TransformerLayerSubmodules:
    """Transformer Engine's modules where it is there, else Megatron's own with torch's norm and attention."""
    if uses_transformer_engine(context.device):
        _refuse_window_in_context(path, index, config, context)
        submodules = get_gpt_layer_with_transformer_engine_submodules(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
        )
    else:
        submodules = _without_transformer_engine(config, context)
    build, other = submodules.mlp, copy.copy(config)
    other.add_bias_linear = mlp_bias  # Megatron's one flag speaks of attention and MLP

    def mlp(config: TransformerConfig, **kwargs: Any) -> nn.Module:
        return build(config=other, **kwargs)

    submodules.mlp = mlp
    return submodules


def _refuse_window_in_context(path: str, index: int, config: TransformerConfig, context: Context) -> None:
    kind = comm_type(config, index)
    if context.context_parallel is None or config.window_size is None or kind in ("a2a", "all_gather"):
        return
    what = f"Transformer Engine has no sliding window under context parallelism with --cp-comm-type {kind}"
    raise ScheduleError(
        Problem(what, path, remedy="say --cp-comm-type a2a or all_gather, or use level('fused') here")
    )


def _without_transformer_engine(config: TransformerConfig, context: Context) -> TransformerLayerSubmodules:
    device = context.device
    submodules = get_gpt_layer_local_submodules(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
        multi_latent_attention=config.multi_latent_attention,
    )

    def norm(config: TransformerConfig, hidden_size: int, eps: float) -> nn.Module:
        return nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype, device=device)

    submodules.input_layernorm = submodules.pre_mlp_layernorm = norm
    inner = submodules.self_attention.submodules
    inner.core_attention = partial(CoreAttention, ranks=context.context_parallel)
    if config.multi_latent_attention:
        inner.core_attention = ModuleSpec(CoreAttention, params={"ranks": context.context_parallel})
        inner.q_layernorm = inner.kv_layernorm = norm
    elif config.qk_layernorm:
        inner.q_layernorm = inner.k_layernorm = norm
    return submodules


class CoreAttention(nn.Module):
    """Causal attention, perhaps in a window, by torch's fused kernel where Megatron's layer has its core.

    Megatron's own without Transformer Engine keeps a [b, heads, s, s] tensor.
    """

    def __init__(
        self,
        config: TransformerConfig,
        softmax_scale: float | None = None,
        ranks: ContextParallel | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.ranks = ranks
        self.dropout, self.scale = config.attention_dropout, softmax_scale
        self.window = None if config.window_size is None else config.window_size[0] + 1

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """[s, b, heads, d] each, k and v with fewer heads -> [s, b, heads * d]; packed ones are without b."""
        if packed_seq_params is not None:
            query, key, value = (tensor[:, None] for tensor in (query, key, value))
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        mask: torch.Tensor | None
        if packed_seq_params is not None:
            mask = packed_mask(packed_seq_params.cu_seqlens_q, 1, q.shape[2], self.window)
        elif self.ranks is None:
            mask = None if self.window is None else window_mask(self.window, q.shape[2], q.device)
        else:
            k, v = self.ranks.gather_together(k, v)
            places = self.ranks.zigzag.positions(q.shape[2], q.device)
            mask = causal_mask(places, k.shape[2], self.window)
        with fork_rng() if dropout else nullcontext():  # each TP rank has heads of its own
            output = fused_attention(q, k, v, mask, mask is None, dropout, self.scale)
        output = output.permute(2, 0, 1, 3).flatten(2)
        return output if packed_seq_params is None else output[:, 0]


@lru_cache(maxsize=2)
def window_mask(window: int, length: int, device: torch.device) -> torch.Tensor | None:
    """[s, s], True where a token attends: to itself and the ``window - 1`` before it; None where that is all."""
    if window >= length:
        return None
    everywhere = torch.ones(length, length, dtype=torch.bool, device=device)
    return everywhere.tril() & ~everywhere.tril(-window)
