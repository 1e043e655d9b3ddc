"""Reads the sizes that Megatron wants to know from HF configs, by the names that they have there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megasched.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class SourcedValue:
    """Holds one value for Megatron, and where it was read.

    Attributes:
        value: value that ``args`` gets.
        source: where it was read, in the words of the HF side, e.g. ``n_embd = 768``.
    """

    value: Any
    source: str


@dataclass(frozen=True)
class Field:
    """Lists the names under which HF configs keep one value of Megatron's.

    Attributes:
        dest: attribute of Megatron's ``args``.
        names: HF names, the usual one first; the first that holds a value counts.
        default: ``args`` value when no name holds one; None leaves ``args`` as it is.
        required: whether a config without any of the names is an error.
    """

    dest: str
    names: tuple[str, ...]
    default: Any = None
    required: bool = False


FIELDS = (
    Field("num_layers", ("num_hidden_layers", "n_layer", "n_layers", "num_layers"), required=True),
    Field("hidden_size", ("hidden_size", "n_embd", "d_model"), required=True),
    Field("max_position_embeddings", ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")),
    Field("init_method_std", ("initializer_range", "init_std")),
    Field(
        "attention_dropout",
        ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout"),
        default=0.0,
    ),
    Field(
        "hidden_dropout",
        (
            "hidden_dropout",
            "resid_pdrop",
            "resid_dropout",
            "residual_dropout",
            "hidden_dropout_prob",
            "dropout",
        ),
        default=0.0,
    ),
)
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
WITHOUT_HEADS = ("attention_hidden_size",)  # RWKV's, which is a recurrence
HEAD_DIM = ("head_dim", "kv_channels", "attention_head_dim", "d_kv")
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
FFN = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "inner_size")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk")
NORM_EPSILON = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")


def read(config: PretrainedConfig, names: tuple[str, ...]) -> SourcedValue | None:
    """Reads the first of these fields that holds a value, with its name in config.json as source; or None."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            spelled = config.attribute_map.get(name, name)
            return SourcedValue(value, f"{spelled} = {value}")
    return None


def required(config: PretrainedConfig, dest: str, names: tuple[str, ...]) -> SourcedValue:
    """Reads the field that Megatron's ``dest`` needs, as ``read`` does, and raises where there is none.

    Raises:
        ConfigError: none of the names holds a value, or it is a list.
    """
    found = read(config, names)
    if found is None:
        raise ConfigError(
            f"{type(config).__name__} has none of {', '.join(names)}, so Megatron's {dest} is unknown; "
            f"if this config calls it otherwise, its class must say so: attribute_map = {{{names[0]!r}: ITS NAME}}"
        )
    if isinstance(found.value, list | tuple):
        raise ConfigError(
            f"{found.source}: layers of several sizes, and Megatron's {dest} is one number for all of them"
        )
    return found


def sizes_in(config: PretrainedConfig) -> Iterator[tuple[str, SourcedValue]]:
    """Yields each of ``FIELDS`` that the config holds or that has a default.

    Raises:
        ConfigError: a required one is missing.
    """
    for field in FIELDS:
        if field.required:
            yield field.dest, required(config, field.dest, field.names)
            continue
        found = read(config, field.names)
        if found is not None and field.dest == "max_position_embeddings" and found.value < 1:
            continue  # XLNet's -1: no limit
        if found is not None:
            yield field.dest, found
        elif field.default is not None:
            yield field.dest, SourcedValue(field.default, f"none of {', '.join(field.names)}")


def rope_of(config: PretrainedConfig) -> dict[str, Any] | None:
    """Returns the RoPE parameters, of several sets (one a layer type) those of full attention; None without."""
    rope = getattr(config, "rope_parameters", None)
    if rope and "rope_type" not in rope:
        sets = {name: value for name, value in rope.items() if isinstance(value, dict)}
        rope = sets.get("full_attention") or next(iter(sets.values()), rope)
    if rope:
        return rope
    # GPT-J and CodeGen have neither base nor fraction, only how many channels of a head turn.
    return {"rotary_dim": config.rotary_dim} if getattr(config, "rotary_dim", None) else None
