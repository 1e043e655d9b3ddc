"""A decoder layer computed by Megatron's own ``TransformerLayer``, filled with the definition's weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megasched.errors import Problem, ScheduleError
from megasched.lowering.attention_te import uses_transformer_engine
from megasched.lowering.block_parameters import SINKS, assemblies, has_bias, mixture_in
from megasched.lowering.context import Context
from megasched.lowering.context_parallel import ContextParallel, comm_type
from megasched.lowering.filling import fill_module
from megasched.lowering.latent_attention import LatentAngles, latent_config, settle_latent_attention
from megasched.lowering.layer_modules import layer_submodules
from megasched.lowering.mixture import mixture_config, note_correction, settle_biases
from megasched.lowering.mlp import mlp_config
from megasched.roles import Block, Roles
from megasched.trial.dims import Along
from megasched.trial.slot import Slot

# (length, device) -> rotary angles [s, 1, 1, d], float32
Angles = Callable[[int, torch.device], torch.Tensor]
# a layer's number -> its angles; None where it has no positions
LayerAngles = Callable[[int], Angles | None]


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
    path: str, old: nn.Module, model: nn.Module, roles: Roles, angles: LayerAngles, context: Context
) -> MegatronLayer:
    """Megatron's layer in the place of the definition's layer at ``path``, its values filled in.

    Args:
        angles: of ``rotary_angles``.

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
    everywhere = angles(index)
    given = None if everywhere is None else partial(_own_angles, everywhere, context.context_parallel)
    mixture, te = mixture_in(plan, path, roles), uses_transformer_engine(context.device)
    mlp_bias = has_bias(plan, path, block.mlp.down) if mixture is None else mixture.expert.biased
    if te:
        _refuse_in_context(path, index, config, context)
    layer = TransformerLayer(
        config,
        layer_submodules(block, config, context, mlp_bias, te),
        layer_number=index + 1,
        pg_collection=groups,
        add_layer_offset=False,
    )
    if block.latent is not None:
        assert given is not None
        own = LatentAngles(partial(given, context.device), parts, block.latent.factor)
        settle_latent_attention(layer.self_attention, block.latent, config, own, context.device, te)
    fill_module(path, layer, assemblies(plan, path, roles, groups.ep.rank()), model, context)
    layer.self_attention._yarn_concentration_factor = block.rotary_factor
    if block.sinks:
        sinks = layer.self_attention.get_parameter(SINKS)
        set_tensor_model_parallel_attributes(sinks, is_parallel=True, dim=0, stride=1)
    if mixture is not None:
        settle_biases(layer.mlp, mixture, te)
        note_correction(f"{path}.layer.mlp", path, mixture, context)
    new = MegatronLayer(layer, structure.slot, given if block.latent is None else None, parts)
    for name, value in vars(old).items():  # the model may read them off its layers (attention_type)
        if isinstance(value, str | int | float) and name not in vars(new):
            setattr(new, name, value)
    return new


def rotary_angles(model: nn.Module, block: Block) -> LayerAngles:
    """Angles by the definition's own frequencies; layers with the same ones have the same angles."""
    known: dict[str, Angles] = {}

    def of_layer(index: int) -> Angles | None:
        if not block.rotary or (block.rotated and not block.rotated[index]):
            return None
        name = block.frequencies[index] if block.frequencies else "inv_freq"
        if name not in known:
            frequencies = model.get_submodule(block.rotary).get_buffer(name)
            known[name] = _angles(frequencies, block.interleaved)
        return known[name]

    return of_layer


def _angles(frequencies: torch.Tensor, interleaved: bool) -> Angles:
    """Angles of every position; computed once for a length."""

    @lru_cache(maxsize=2)
    def angles(length: int, device: torch.device) -> torch.Tensor:
        positions = torch.arange(length, device=device, dtype=torch.float32)
        half = torch.outer(positions, frequencies.to(device, torch.float32))
        # Each angle stands where the two features are that it rotates.
        both = half.repeat_interleave(2, dim=-1) if interleaved else torch.cat((half, half), dim=-1)
        return both[:, None, None, :]

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
    mlp = mlp_config(path, block.mlp, context) if mixture is None else mixture_config(path, mixture, context)
    latent = block.latent
    attention = {"qk_layernorm": bool(block.q_norm)} if latent is None else latent_config(latent)
    # Without what a run on a GPU alone can do, the flags of the trainer count (fusions, recompute, precision).
    config = context.config_with(
        **mlp | attention | {"add_bias_linear": has_bias(plan, path, block.out)},
        num_attention_heads=block.heads,
        num_query_groups=block.groups,
        kv_channels=block.head_dim,
        softmax_scale=block.softmax_scale,
        softmax_type="learnable" if block.sinks else "vanilla",
        rotary_interleaved=block.interleaved,
        normalization=block.normalization,
        layernorm_zero_centered_gamma=block.zero_centered,
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


def _refuse_in_context(path: str, index: int, config: TransformerConfig, context: Context) -> None:
    """What Transformer Engine's attention has not under context parallelism."""
    if context.context_parallel is None:
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
