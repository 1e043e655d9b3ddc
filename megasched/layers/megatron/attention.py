"""Computes attention by Megatron's own ``SelfAttention``, filled with the definition's weights.

Whole layers of Megatron use the parts of this module, too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megasched.errors import Problem, ScheduleError
from megasched.language.module_specs import AttentionSpec
from megasched.layers.build_context import BuildContext
from megasched.layers.context_parallel import comm_type
from megasched.layers.megatron.fill import fill_module
from megasched.layers.megatron.layer_spec import attention_spec
from megasched.layers.megatron.mla import LatentAngles, configure_mla, latent_config
from megasched.layers.megatron.rotary import LayerAngles, OwnAngles
from megasched.layers.te.attention import uses_transformer_engine
from megasched.plan.megatron.params import SINKS, attention_assemblies, has_bias, output_features


class MegatronAttention(nn.Module):
    """Replaces the definition's attention.

    Args:
        layer: Megatron's, which takes and returns [s (/ tp under SP), b, h].
        angles: (device, length) -> rotary angles [s, 1, 1, head_dim] of this rank, float32; None if it is given
            none.
        parts: number of parts into which sequence parallelism splits the hidden state.
    """

    def __init__(self, layer: nn.Module, angles: OwnAngles | None, parts: int) -> None:
        super().__init__()
        self.layer, self.angles, self.parts = layer, angles, parts

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        """Maps [b, s (/ tp), h] to the same shape and no attention weights; see ``MegatronLayer.forward``."""
        hidden, packed = sequence_first(hidden_states, kwargs)
        angles = None if self.angles is None else self.angles(hidden.device, hidden.shape[0] * self.parts)
        output, bias = self.layer(hidden, attention_mask=None, rotary_pos_emb=angles, packed_seq_params=packed)
        output = output if bias is None else output + bias
        return output.transpose(0, 1).reshape(hidden_states.shape), None


def sequence_first(hidden: torch.Tensor, arguments: dict[str, Any]) -> tuple[torch.Tensor, PackedSeqParams | None]:
    """Returns [s, b, h] of [b, s, h], as Megatron needs it, and the bounds of packed sequences under its names.

    With packed sequences all rows become one, the only form of packing that Megatron supports.
    """
    bounds = arguments.get("cu_seq_lens_q")
    if bounds is None:
        return hidden.transpose(0, 1).contiguous(), None
    longest = arguments["max_length_q"]
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        tokens_per_sample=hidden.shape[1],  # by which a mixture's router parts the rows again (seq_aux_loss)
    )
    return hidden.flatten(0, 1)[:, None].contiguous(), packed


def lower_attention(
    path: str, model: nn.Module, attention: AttentionSpec, angles: LayerAngles, context: BuildContext
) -> MegatronAttention:
    """Returns Megatron's attention for the definition's at ``path``, filled with its values.

    Args:
        angles: result of ``rotary_angles``.

    Raises:
        RuntimeError: a parameter of Megatron's has no known HF tensor, or an HF tensor no parameter.
    """
    structure = context.plan.stack
    index = structure.index_of(path)
    assert index is not None
    layer, own = structure.layer_path(index), angles(index)
    config = context.config_with(
        **attention_config(layer, index, attention, context),
        num_moe_experts=None,
        hidden_size=output_features(context.plan, layer, attention.out),
    )
    assert isinstance(config, TransformerConfig)
    refuse_in_context(path, index, config, context)
    options: dict[str, Any] = {"pg_collection": context.groups}
    if context.context_parallel is not None:
        options["cp_comm_type"] = comm_type(config, index)
    made: Any = build_module(
        attention_spec(config, context, uses_transformer_engine(context.device)),
        config=config,
        layer_number=index + 1,
        **options,
    )
    configure_latent_attention(made, attention, own, context)
    fill_module(path, made, attention_assemblies(context.plan, layer, attention), model, context)
    configure_attention(made, attention)
    return MegatronAttention(made, own if attention.mla is None else None, sequence_shards(context))


def sequence_shards(context: BuildContext) -> int:
    """Returns the number of parts into which sequence parallelism splits the hidden state."""
    return context.size if context.config.sequence_parallel else 1


def attention_config(layer: str, index: int, attention: AttentionSpec, context: BuildContext) -> dict[str, Any]:
    """Returns the fields of Megatron's config for the attention of layer number ``index``."""
    window = attention.windows[index] if attention.windows else None
    latent = attention.mla
    kind = {"qk_layernorm": bool(attention.q_norm)} if latent is None else latent_config(latent)
    return kind | {
        "num_attention_heads": attention.heads,
        "num_query_groups": attention.kv_heads,
        "kv_channels": attention.head_dim,
        "attention_output_gate": attention.gated,
        "softmax_scale": attention.softmax_scale,
        "softmax_type": "learnable" if attention.sinks else "vanilla",
        "rotary_interleaved": attention.interleaved,
        "normalization": attention.normalization,
        "layernorm_zero_centered_gamma": attention.zero_centered,
        "layernorm_epsilon": attention.eps,
        "window_size": None if window is None else (window - 1, 0),  # HF counts the token itself
        "add_bias_linear": has_bias(context.plan, layer, attention.out),
        "add_qkv_bias": has_bias(context.plan, layer, attention.inputs[0]),
        "attention_dropout": attention.dropout,
        "init_method": nn.init.zeros_,
        "output_layer_init_method": nn.init.zeros_,
    }


def configure_latent_attention(
    made: Any, attention: AttentionSpec, angles: OwnAngles | None, context: BuildContext
) -> None:
    """Configures latent attention before values are filled in; other attention stays unchanged."""
    latent = attention.mla
    if latent is None:
        return
    assert angles is not None
    own = LatentAngles(partial(angles, context.device), sequence_shards(context), latent.rotary_factor)
    te = uses_transformer_engine(context.device)
    configure_mla(made, latent, made.config, own, context.device, te)


def configure_attention(made: Any, attention: AttentionSpec) -> None:
    """Configures Megatron's attention after values are filled in."""
    made._yarn_concentration_factor = attention.rotary_factor
    if attention.sinks:
        set_tensor_model_parallel_attributes(made.get_parameter(SINKS), is_parallel=True, dim=0, stride=1)


def refuse_in_context(path: str, index: int, config: TransformerConfig, context: BuildContext) -> None:
    """Refuses attention that Transformer Engine does not support under context parallelism.

    Raises:
        ScheduleError: the layer has such attention.
    """
    if context.context_parallel is None or not uses_transformer_engine(context.device):
        return
    kind = comm_type(config, index)
    for asked, what, kinds in (
        (config.window_size is not None, "sliding window", ("a2a", "all_gather")),
        (config.softmax_type != "vanilla", "sinks", ("a2a",)),
    ):
        if asked and kind not in kinds:
            no = f"Transformer Engine has no {what} under context parallelism with --cp-comm-type {kind}"
            remedy = f"say --cp-comm-type {' or '.join(kinds)}, or use level('fused') here"
            raise ScheduleError(Problem(no, path, remedy=remedy))
