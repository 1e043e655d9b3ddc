"""Derives what Megatron must know of the model from the HF config and the definition that it describes.

Megatron's trainer reads these values from its flags: for its FLOPs count (``training/training.py``), its memory
estimate (``training/theoretical_memory_usage.py``), its checks of the layout
(``core/transformer/transformer_config.py``) and the ranks of the embedding group. The model itself is the
definition; nothing here changes what it computes.

Sizes are read from the config by name (``model_sizes.py``). What no config says (which linears have a bias,
whether the MLP is gated, whether positions are learned) is read off the definition's modules, built on the meta
device, never guessed from the name of the architecture.
"""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megasched.definition.build import init_empty_weights, input_embedding, text_config
from megasched.definition.code_state.random_states import seeded
from megasched.definition.objectives import CAUSAL_LM, Objective
from megasched.errors import ConfigError, MegaschedError
from megasched.language.lora import is_linear_class
from megasched.trainer.flags.model_sizes import (
    EXPERTS_PER_TOKEN,
    FFN,
    HEAD_DIM,
    HEADS,
    KEY_VALUE_HEADS,
    NORM_EPSILON,
    WITHOUT_HEADS,
    SourcedValue,
    read,
    required,
    rope_of,
    sizes_in,
)
from megasched.trainer.weight_decay import is_norm

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel


def derive(
    config: PretrainedConfig, objective: Objective = CAUSAL_LM, *, trust_remote_code: bool = False
) -> dict[str, SourcedValue]:
    """Derives all that Megatron must know of the model: ``args`` attribute -> value, with where it was read.

    ``vocab_size`` is the model's own, without padding: `megasched.trainer.flags.arguments` decides the padding,
    which depends on the layout. ``qk_layernorm`` says whether the definition has q/k norms; Megatron's rule
    for their gradients goes by parameter names (``core/distributed/finalize_model_grads.py:453``), so
    whoever builds the ``TransformerConfig`` must not leave that decision to it.
    """
    model = build_on_meta(config, objective, trust_remote_code=trust_remote_code)
    text = text_config(config)
    found = sizes_of(model)
    found["vocab_size"] = _classes(config, objective)
    found["untie_embeddings_and_output_weights"] = _untied(config, model)
    length = objective.sequence_length(config)
    if length is not None:
        found["seq_length"] = SourcedValue(*length)
    layer = _last_layer(model, found["num_layers"].value)
    found |= _mlp(text, layer, found)
    found |= _norms(text, layer)
    found |= _biases(layer)
    found |= _positions(text, model, found)
    return found


def sizes_of(model: PreTrainedModel) -> dict[str, SourcedValue]:
    """Returns the sizes that ``derive`` reads from the config, and those of attention heads."""
    text = text_config(model.config)
    found = dict(sizes_in(text))
    return found | _heads(text, model, found)


def heads_for_tp(sizes: dict[str, SourcedValue], tp: int) -> dict[str, SourcedValue]:
    """Returns the sizes, with the next multiple of TP in place of a number of heads that is none.

    Megatron's ``TransformerConfig`` refuses such a number. The plan knows better: TP splits nothing of one head,
    and of five it leaves attention whole or refuses them itself.
    """
    heads, groups = sizes["num_attention_heads"], sizes["num_query_groups"]
    heads = replace(heads, value=-(-heads.value // tp) * tp)
    if groups.value % tp and tp % groups.value:
        groups = heads
    return {**sizes, "num_attention_heads": heads, "num_query_groups": groups}


def build_on_meta(
    config: PretrainedConfig, objective: Objective = CAUSAL_LM, *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Builds the definition with parameters and buffers on the meta device, for its structure alone.

    Other tensors are real, as in ``build_definition``: constructors ask for their values, as for rates by layer.
    """
    import torch
    import transformers

    auto_class = getattr(transformers, objective.auto_class)
    try:
        with seeded(0), init_empty_weights(include_buffers=True):
            options = {"dtype": torch.float32, "trust_remote_code": trust_remote_code}
            return auto_class.from_config(copy.deepcopy(config), **options)
    except MegaschedError:
        raise
    except Exception as error:  # of whatever kind, of the class's own code
        raise ConfigError(
            f"transformers can't build a {objective.model} from this {type(config).__name__}: {error}"
        ) from error


# ---- from the config --------------------------------------------------------------------------------


def _classes(config: PretrainedConfig, objective: Objective) -> SourcedValue:
    """Returns the number of classes that a label can be of, which Megatron calls the vocabulary."""
    try:
        return SourcedValue(*objective.classes(config))
    except AttributeError as error:
        raise ConfigError(
            f"{type(config).__name__} does not say how many classes there are, so Megatron's vocab_size is "
            f"unknown: {error}"
        ) from error


def _heads(
    config: PretrainedConfig, model: PreTrainedModel, sizes: dict[str, SourcedValue]
) -> dict[str, SourcedValue]:
    attends = any(_in_attention(path) for path, _ in model.named_modules())
    if attends and read(config, WITHOUT_HEADS) is None:
        heads = required(config, "num_attention_heads", HEADS)
    else:
        # Megatron wants a number (`training/arguments.py:1274`); of one head, TP can't split anything.
        heads = read(config, HEADS) or SourcedValue(1, f"{type(model).__name__} has no attention heads")
    hidden = sizes["hidden_size"]
    per_head = read(config, HEAD_DIM)
    if per_head is None:
        per_head = SourcedValue(hidden.value // heads.value, f"{hidden.source}, {heads.source}")
    groups = read(config, KEY_VALUE_HEADS) or heads
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        groups = SourcedValue(1, "multi_query = True")
    return {
        "num_attention_heads": heads,
        "kv_channels": per_head,
        "group_query_attention": SourcedValue(groups.value != heads.value, groups.source),
        "num_query_groups": groups,
    }


# ---- from the definition ----------------------------------------------------------------------------


def _last_layer(model: PreTrainedModel, num_layers: int) -> nn.Module:
    """Returns the last decoder layer, as the first ones of MoE models may be dense.

    The layer list is the first ModuleList that is as long as the model is deep, or else the longest. A model
    without lists is taken as a whole.
    """
    from torch import nn

    decoder = model.get_decoder() or model
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList) and len(module)]
    fitting = [layers for layers in lists if len(layers) == num_layers]
    return (fitting[0] if fitting else max(lists, key=len))[-1] if lists else model


def _untied(config: PretrainedConfig, model: PreTrainedModel) -> SourcedValue:
    head, table = model.get_output_embeddings(), input_embedding(model)
    if head is None:
        return SourcedValue(True, f"{type(model).__name__} has no head over a vocabulary")
    tied = bool(getattr(config, "tie_word_embeddings", False))
    weight = getattr(head, "weight", None)
    if not tied and weight is not None and weight is getattr(table, "weight", None):
        return SourcedValue(False, f"{type(model).__name__} has one weight for both")
    return SourcedValue(not tied, f"tie_word_embeddings = {tied}")


def _in_attention(path: str) -> bool:
    return re.search(r"attn|attention", path) is not None


def _mlp_matrices(layer: nn.Module, *, routed: bool) -> list[int]:
    """Returns the element counts of the matrices of one MLP; of one routed expert where there are some.

    Otherwise they are the matrices below one module that has the most elements of the layer. Convolutions and
    recurrences have parameters of three dimensions too, so that only a ``routed`` model has experts.
    """
    parents: dict[str, list[int]] = {}
    experts: dict[str, list[int]] = {}
    for path, module in layer.named_modules():
        if _in_attention(path):
            continue
        parent = path.rpartition(".")[0]
        for param in module.parameters(recurse=False):
            if param.dim() == 3 and routed and "conv" not in path:
                experts.setdefault(path, []).append(param[0].numel())
            elif param.dim() == 2 and is_linear_class(module):
                parents.setdefault(parent, []).append(param.numel())
    return max((experts or parents).values(), key=sum, default=[])


def _mlp(config: PretrainedConfig, layer: nn.Module, sizes: dict[str, SourcedValue]) -> dict[str, SourcedValue]:
    experts = read(config, EXPERTS_PER_TOKEN)
    matrices = _mlp_matrices(layer, routed=experts is not None)
    name = type(layer).__name__
    # Up and down are equal; a gate adds a third, beside up or packed with it.
    gated = bool(matrices) and sum(matrices) > 2.5 * min(matrices)
    found = {"swiglu": SourcedValue(gated, f"{name} has {'a gated' if gated else 'no gated'} MLP")}
    width = read(config, FFN)
    if width is None or not isinstance(width.value, int):
        if not matrices:
            return found
        width = SourcedValue(min(matrices) // sizes["hidden_size"].value, f"the width of the MLP of {name}")
    found["ffn_hidden_size"] = _active_width(config, experts, matrices, sizes) if experts else width
    return found


def _active_width(
    config: PretrainedConfig, experts: SourcedValue, matrices: list[int], sizes: dict[str, SourcedValue]
) -> SourcedValue:
    """Returns the MLP width that one token goes through; FLOPs are counted as of a dense MLP that wide.

    ``num_experts`` stays unset: the router is HF's, and with it set the trainer would report and scale auxiliary
    losses that only Megatron's own router records.
    """
    one = min(matrices) // sizes["hidden_size"].value
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    shared = shared or (getattr(config, "n_shared_experts", None) or 0) * one
    source = f"{experts.source}, experts of width {one}"
    if shared:
        source += f", shared expert of width {shared}"
    return SourcedValue(experts.value * one + shared, source)


def _norms(config: PretrainedConfig, layer: nn.Module) -> dict[str, SourcedValue]:
    norms = {path: module for path, module in layer.named_modules() if is_norm(module)}
    outside = [module for path, module in norms.items() if not _in_attention(path)]
    found = {}
    if outside:
        kind = type(outside[0]).__name__
        found["normalization"] = SourcedValue("RMSNorm" if "rms" in kind.lower() else "LayerNorm", kind)
        own = getattr(outside[0], "eps", getattr(outside[0], "variance_epsilon", None))
        epsilon = read(config, NORM_EPSILON) or (SourcedValue(own, f"{kind}.eps = {own}") if own else None)
        if epsilon:
            found["layernorm_epsilon"] = epsilon
    # The latent norms of multi-head latent attention (q_a_, kv_a_) are not norms of heads.
    leaves = [path.rpartition(".")[2] for path in norms if _in_attention(path)]
    per_head = sorted({leaf for leaf in leaves if leaf[:1] in "qk" and "_a_" not in leaf})
    source = f"{type(layer).__name__} has {', '.join(per_head) or 'no q/k norms'}"
    found["qk_layernorm"] = SourcedValue(bool(per_head), source)
    return found


def _biases(layer: nn.Module) -> dict[str, SourcedValue]:
    """Returns ``add_bias_linear``, for linears outside attention, and ``add_qkv_bias``, for those inside."""
    linears = [(path, module) for path, module in layer.named_modules() if is_linear_class(module)]
    biased = [path for path, module in linears if module.bias is not None]
    attention = [path for path in biased if _in_attention(path)]
    others = [path for path in biased if not _in_attention(path)]
    name = type(layer).__name__

    def say(paths: list[str], where: str) -> SourcedValue:
        return SourcedValue(bool(paths), f"{name} has {f'a bias in {paths[0]}' if paths else f'no bias {where}'}")

    return {
        "add_bias_linear": say(others, "outside attention"),
        "add_qkv_bias": say(attention, "in attention"),
    }


def _position_table(model: PreTrainedModel, positions: int) -> str | None:
    """Returns the path of a learned table of positions, an embedding with a row for each; None without."""
    from torch import nn

    tokens = input_embedding(model)
    for path, module in model.named_modules():
        is_table = isinstance(module, nn.Embedding) and module is not tokens
        # OPT and its relatives keep a few rows more than positions.
        if is_table and positions <= module.num_embeddings <= positions + 8:
            return path
    return None


def _positions(
    config: PretrainedConfig, model: PreTrainedModel, sizes: dict[str, SourcedValue]
) -> dict[str, SourcedValue]:
    rope = rope_of(config)
    if rope is not None:
        return _rotary(rope, sizes)
    longest = sizes.get("max_position_embeddings")
    table = _position_table(model, longest.value) if longest else None
    if table:
        return {"position_embedding_type": SourcedValue("learned_absolute", f"{table} is a table of positions")}
    source = f"{type(config).__name__} has neither RoPE parameters nor a table of positions"
    return {"position_embedding_type": SourcedValue("none", source)}


def _rotary(rope: dict[str, Any], sizes: dict[str, SourcedValue]) -> dict[str, SourcedValue]:
    base = rope.get("rope_theta", 10000)
    # Megatron keeps the base as an integer.
    base = int(base) if math.isclose(base, round(base)) else base
    percent, source = rope.get("partial_rotary_factor", 1.0), "partial_rotary_factor"
    if rope.get("rotary_dim"):
        percent, source = (
            rope["rotary_dim"] / sizes["kv_channels"].value,
            f"rotary_dim = {rope['rotary_dim']}",
        )
    kind = rope.get("rope_type", "default")
    found = {
        "position_embedding_type": SourcedValue("rope", f"rope_type = {kind}"),
        "rotary_base": SourcedValue(base, f"rope_theta = {base}"),
        "rotary_percent": SourcedValue(percent, f"{source} = {percent}"),
        "use_rope_scaling": SourcedValue(kind == "llama3", f"rope_type = {kind}"),
    }
    if kind == "llama3":
        found["rope_scaling_factor"] = SourcedValue(rope["factor"], f"factor = {rope['factor']}")
    return found
