"""Computes a decoder layer by Megatron's own ``TransformerLayer``, filled with the definition's weights."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megasched.analysis.stages.hidden_state import HiddenStateArg
from megasched.language.module_specs import LayerSpec
from megasched.layers.build_context import BuildContext
from megasched.layers.megatron.attention import (
    attention_config,
    configure_attention,
    configure_latent_attention,
    refuse_in_context,
    sequence_first,
    sequence_shards,
)
from megasched.layers.megatron.fill import fill_module
from megasched.layers.megatron.layer_spec import layer_submodules
from megasched.layers.megatron.mlp import mlp_config
from megasched.layers.megatron.moe import configure_moe, moe_config, note_correction
from megasched.layers.megatron.rotary import LayerAngles, OwnAngles
from megasched.layers.te.attention import uses_transformer_engine
from megasched.plan.megatron.params import assemblies, has_bias, mixture_in


class MegatronLayer(nn.Module):
    """Replaces a decoder layer, with the definition's calling convention.

    Args:
        layer: Megatron's, which takes and returns [s (/ tp under SP), b, h].
        slot: position of the hidden state among the definition's arguments.
        angles: (device, length) -> rotary angles [s, 1, 1, head_dim] of this rank, float32; None if the layer is
            given none.
        parts: number of parts into which sequence parallelism splits the hidden state.
        to_definition: whether the next layer is the definition's, whose code may take a view of its hidden state.
            Megatron's turns it back to [s, b, h], which costs nothing as long as nobody has copied it.
    """

    def __init__(
        self,
        layer: TransformerLayer,
        slot: HiddenStateArg,
        angles: OwnAngles | None,
        parts: int,
        to_definition: bool,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.slot, self.angles, self.parts, self.to_definition = slot, angles, parts, to_definition

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Passes the hidden state [b, s (/ tp), h] through Megatron's layer.

        Of the other arguments only the bounds of packed sequences are used: Megatron's causal layer needs neither
        masks nor positions.
        """
        given = self.slot.get(args, kwargs)
        hidden, packed = sequence_first(given, kwargs)
        length = hidden.shape[0] * self.parts
        # Of packed sequences, attention sees the distance of two tokens alone, wherever Megatron counts from.
        angles = None if self.angles is None else self.angles(hidden.device, length)
        try:
            output, _ = self.layer(hidden, attention_mask=None, rotary_pos_emb=angles, packed_seq_params=packed)
        finally:
            # A recompute ends within the layer, as soon as all is there again. Megatron's layer would keep its
            # hidden state then, and with it all that was recomputed, until it is called again.
            self.layer.mlp_norm_manager = None
        output = output.transpose(0, 1).reshape(given.shape)
        return self.slot.wrap(output.contiguous() if self.to_definition else output)


def lower_block(
    path: str, old: nn.Module, model: nn.Module, angles: LayerAngles, context: BuildContext
) -> MegatronLayer:
    """Returns Megatron's layer for the definition's layer at ``path``, filled with its values.

    Args:
        angles: result of ``rotary_angles``.

    Raises:
        RuntimeError: a parameter of Megatron's layer has no known HF tensor, or an HF tensor no parameter.
    """
    plan, structure, block = context.plan, context.plan.stack, context.plan.roles.layer
    assert isinstance(block, LayerSpec)
    index = structure.index_of(path)
    assert index is not None
    config, groups = _config(path, index, context), context.groups
    own = angles(index)
    mixture, te = mixture_in(plan, path), uses_transformer_engine(context.device)
    mlp_bias = has_bias(plan, path, block.mlp.down) if mixture is None else mixture.expert.biased
    refuse_in_context(path, index, config, context)
    layer = TransformerLayer(
        config,
        layer_submodules(block, config, context, mlp_bias, te),
        layer_number=index + 1,
        pg_collection=groups,
        add_layer_offset=False,
    )
    configure_latent_attention(layer.self_attention, block.attention, own, context)
    fill_module(path, layer, assemblies(plan, path, groups.ep.rank()), model, context)
    configure_attention(layer.self_attention, block.attention)
    if mixture is not None:
        configure_moe(layer.mlp, mixture, te)
        note_correction(f"{path}.layer.mlp", path, mixture, context)
    given = own if block.attention.mla is None else None
    to_definition = index + 1 < structure.count and structure.layer_path(index + 1) not in plan.blocks
    new = MegatronLayer(layer, structure.slot, given, sequence_shards(context), to_definition)
    for name, value in vars(old).items():  # the model may read them off its layers (attention_type)
        if isinstance(value, str | int | float) and name not in vars(new):
            setattr(new, name, value)
    return new


def _config(path: str, index: int, context: BuildContext) -> TransformerConfig:
    """Returns the trainer's config with the definition's values for layer number ``index``."""
    block, mixture = context.plan.roles.layer, mixture_in(context.plan, path)
    assert isinstance(block, LayerSpec)
    mlp = mlp_config(path, block.mlp, context) if mixture is None else moe_config(path, mixture, context)
    # Without what a run on a GPU alone can do, the flags of the trainer count (fusions, recompute, precision).
    config = context.config_with(**mlp | attention_config(path, index, block.attention, context))
    config.hidden_dropout = block.hidden_dropout
    assert isinstance(config, TransformerConfig)
    return config
