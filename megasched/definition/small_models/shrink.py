"""Makes a small config of any architecture: the same structure in sizes that run on a laptop in seconds.

Sizes are set by field name (``SIZES``), flags and choices keep the values of the class, layers keep every kind
that the full depth has, and values that would hide a mistake are changed: dropouts are off, multipliers of 1
become 1.7, windows are shorter than the sequences of the checks.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LAYERS = 4
VOCABULARY = 503  # prime: every layout pads it
TOKENS = (10, 490)  # ids that the checks draw from, half open; special tokens lie outside
MULTIPLIER = 1.7

# Field names, as regular expressions for the whole name -> value. The first that matches counts.
SIZES: tuple[tuple[str, int], ...] = (
    (
        "hidden_size|d_model|n_embd|emb_dim|dim_model|embedding_dim|word_embed_proj_dim|lru_width|embed_dim|dim|"
        "backbone_hidden_size|hidden_size_global|input_size|attention_hidden_size",
        64,
    ),
    ("embedding_size|input_embedding_size|output_embedding_size", 32),
    (
        "num_hidden_layers|n_layers?|num_layers|decoder_layers|num_decoder_layers|num_blocks|num_layers_per_stack",
        LAYERS,
    ),
    ("encoder_layers|num_encoder_layers|depth|conf_num_hidden_layers|num_global_layers", 2),
    (
        "num_attention_heads|n_heads?|num_heads|(de|en)coder_attention_heads|attention_heads|"
        "num_(de|en)coder_attention_heads|conf_num_attention_heads|num_query_groups",
        4,
    ),
    ("num_key_value_heads|num_kv_heads|kv_n_heads|num_global_key_value_heads", 2),
    (
        "head_dim|d_kv|d_head|(v|linear|linear_key|linear_value|global|index)_head_dim|kv_channels|"
        "dim_head|attention_head_size",
        16,
    ),
    (
        "intermediate_size|(de|en)coder_ffn_dim|ffn_dim|ffn_hidden_size|d_ff|d_inner|dff|dim_ff|feed_forward_size|"
        "intermediate_size_mlp|mlp_dim|dense_intermediate_size|hidden_dim",
        128,
    ),
    (
        "moe_intermediate_size|shared_experts?_intermediate_size|moe_shared_expert_intermediate_size|"
        "expert_ffn_hidden_size|shared_intermediate_size",
        32,
    ),
    ("num_experts|num_local_experts|n_routed_experts|moe_num_experts|zero_expert_num", 4),
    ("num_experts_per_tok|num_experts_per_token|moe_topk|moe_top_k|moe_k", 2),
    ("n_group|topk_group|num_expert_group", 1),
    ("n_shared_experts|num_shared_experts|moe_num_shared_experts", 1),
    ("kv_lora_rank|q_lora_rank|o_lora_rank|laurel_rank|hc_lowrank|adapter_rank", 32),
    ("qk_rope_head_dim|rotary_dim", 8),
    ("qk_nope_head_dim|v_head_dim", 16),
    ("index_n_heads", 4),
    ("index_topk", 8),
    (
        "vocab_size|vocab_size_per_layer_input|decoder_vocab_size|unpadded_vocab_size|audio_vocab_size|"
        "pronunciation_vocab_size|shape_vocab_size|codebook_size",
        VOCABULARY,
    ),
    (
        "max_position_embeddings|n_positions|n_ctx|max_seq_len|max_target_positions|context_length|"
        "max_source_positions|model_max_length",
        256,
    ),
    (
        "sliding_window|sliding_window_size|attention_window_size|window_size|local_attention|"
        "attention_chunk_size|keep_window_size",
        8,
    ),
    ("mamba_d_state|ssm_state_size|state_size", 16),
    (
        "mamba_n_heads|mamba_num_heads|n_mamba_heads|linear_num_key_heads|linear_num_value_heads|linear_num_heads",
        4,
    ),
    ("mamba_d_head|mamba_head_dim|mamba_headdim", 32),
    ("mamba_chunk_size|chunk_size", 8),
    ("n_groups|mamba_n_groups|mamba_ngroups", 2),
    ("time_step_rank|mamba_dt_rank", 8),
    ("hidden_size_per_layer_input", 16),
    ("first_k_dense_replace|num_dense_layers", 1),
)
_SIZES = tuple((re.compile(names), value) for names, value in SIZES)
_DEPTH = next(names for names, value in _SIZES if value == LAYERS and names.fullmatch("num_hidden_layers"))
_MULTIPLIER = re.compile(r".*(multiplier|logits?_scal(ing|e)|scale_emb|embedding_scale|scale_depth)$")
_TOKEN = re.compile(r".*(_token_id|_token_index|_id)$")
_LAYER_KINDS = ("layer_types", "mlp_layer_types")
# Of the fields that all config classes have, those that a copy takes over.
_SHARED_FLAGS = ("tie_word_embeddings",)


def shrink(config_class: type[PretrainedConfig], changes: Mapping[str, Any] | None = None) -> PretrainedConfig:
    """Returns a small config of a class.

    Args:
        config_class: e.g. ``LlamaConfig``; the parts of composite ones are shrunk too.
        changes: fields to set to other values; those of a part as a mapping under the part's name.

    Raises:
        Exception: an error of the class about inconsistent sizes; ``changes`` can fix them.
    """
    arguments = _arguments(config_class, dict(changes or {}))
    small = config_class(**arguments)
    kinds = _kinds_of_full_depth(config_class, small)
    if not kinds:
        return small
    part = next((name for name, value in arguments.items() if value is _text(small)), None)
    if part is None:
        return config_class(**{**arguments, **kinds})
    own = {**(changes or {}).get(part, {}), **kinds}
    return config_class(**{**arguments, part: type(_text(small))(**_arguments(type(_text(small)), own))})


def shrink_copy(
    config: PretrainedConfig, changes: Mapping[str, Any] | None = None, *, decoder: bool = True
) -> PretrainedConfig:
    """Returns a small config like a given one: its flags, choices and kinds of layers, in small sizes.

    Args:
        config: of the original model; it is not changed.
        changes: as for ``shrink``.
        decoder: whether the copy is one where the class can be; otherwise it is what the original is.

    Raises:
        Exception: as ``shrink``.
    """
    kept = {"is_decoder": config.is_decoder} if not decoder and "is_decoder" in vars(config) else {}
    return type(config)(**_arguments(type(config), {**(changes or {}), **kept}, config))


def deepen(config: PretrainedConfig, layers: int) -> None:
    """Sets the number of layers of a small config; lists with one entry per layer are repeated."""
    text = _text(config)
    for name, value in list(vars(text).items()):
        if isinstance(value, int) and _DEPTH.fullmatch(_usual_name(type(text), name)):
            setattr(text, name, layers)
        elif isinstance(value, list) and len(value) == LAYERS:
            setattr(text, name, [value[index % LAYERS] for index in range(layers)])


def _arguments(
    config_class: type[PretrainedConfig], changes: dict[str, Any], given: PretrainedConfig | None = None
) -> dict[str, Any]:
    """Returns the constructor arguments of the small config; ``given`` replaces the defaults that are shrunk."""
    defaults = _defaults(config_class)
    found: dict[str, Any] = {}
    if given is not None:
        fields = defaults.keys() | _undeclared(config_class, given)
        defaults |= {name: value for name, value in vars(given).items() if name in fields}
        found = {name: value for name, value in defaults.items() if _is_kept(config_class, name, value)}
    usual = {name: _usual_name(config_class, name) for name in defaults}
    found |= {name: value for name, own in defaults.items() if (value := _small(usual[name], own)) is not None}
    if given is not None:
        found |= _same_grouping(given, found) | _every_kind(defaults)
    if "kv_lora_rank" in defaults and "num_key_value_heads" in found:
        found["num_key_value_heads"] = found.get("num_attention_heads", 4)  # latent attention has no groups
    special = [name for name, default in defaults.items() if _is_special(name, default)]
    found.update({name: min(TOKENS[1] + 1 + place, VOCABULARY - 1) for place, name in enumerate(special)})
    if defaults.get("is_decoder") is False:
        found["is_decoder"] = True
    for name, part in _parts(config_class).items():
        if not isinstance(changes.get(name, {}), dict):
            continue
        own = changes.pop(name, {})
        values = vars(given).get(name) if given is not None else None
        part = part if values is None else type(values)
        found[name] = part(**_arguments(part, dict(own), values))
        if not ("text" in name or "decoder" in name):
            found[name] = part(**{**_arguments(part, dict(own), values), **_two_layers(part)})
    return {**found, **changes}


def _undeclared(config_class: type[PretrainedConfig], given: PretrainedConfig) -> set[str]:
    """Returns the fields of a config that a class of somebody's own takes, and reads, without declaring them."""
    if _is_of_transformers(config_class):
        return set()
    try:
        made = vars(config_class())
    except Exception:  # its defaults don't fit, and what it sets by itself can't be told from what it is given
        return set()
    return {name for name in vars(given).keys() - made.keys() - {"auto_map"} if not name.startswith("_")}


def _usual_name(config_class: type[PretrainedConfig], name: str) -> str:
    """Returns the usual name of a field, where a class of somebody's own maps that to the name it has."""
    names = {} if _is_of_transformers(config_class) else config_class.attribute_map
    return next((usual for usual, own in names.items() if own == name), name)


def _is_of_transformers(config_class: type[PretrainedConfig]) -> bool:
    return config_class.__module__.partition(".")[0] == "transformers"


def _is_kept(config_class: type[PretrainedConfig], name: str, value: Any) -> bool:
    """Returns whether a field of a given config is kept: flags, choices and numbers, but no lists (of layers)."""
    from transformers import PretrainedConfig

    if name in _defaults(PretrainedConfig) and name not in _SHARED_FLAGS:
        return False
    values = list(value.values()) if isinstance(value, dict) else [value]
    return all(one is None or isinstance(one, bool | int | float | str) for one in values)


def _same_grouping(given: PretrainedConfig, small: Mapping[str, Any]) -> dict[str, int]:
    """Returns the number of KV heads if the given config has one, or as many as query heads; else nothing."""
    heads, groups = (vars(given).get(name) for name in ("num_attention_heads", "num_key_value_heads"))
    if groups is None or "num_key_value_heads" not in small:
        return {}
    if groups == heads:
        return {"num_key_value_heads": small.get("num_attention_heads", groups)}
    return {"num_key_value_heads": 1} if groups == 1 else {}


def _every_kind(values: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns lists of layer kinds that repeat every kind of a given config in turn."""
    found = {}
    for name in _LAYER_KINDS:
        kinds = list(dict.fromkeys(values.get(name) or ()))
        if kinds:
            found[name] = [kinds[index % len(kinds)] for index in range(LAYERS)]
    return found


def _two_layers(part: type[PretrainedConfig]) -> dict[str, int]:
    return {name: 2 for name, default in _defaults(part).items() if _DEPTH.fullmatch(name) and default}


def _small(name: str, default: Any) -> Any:
    """Returns the small value of a field, or None to keep its value."""
    if isinstance(default, bool):
        return None
    if isinstance(default, float) and "drop" in name:
        return 0.0
    if isinstance(default, float) and default == 1 and _MULTIPLIER.fullmatch(name):
        return MULTIPLIER
    if isinstance(default, int) and default > 0:
        plain = name.removeprefix("swa_")  # the same size of sliding layers
        return next((value for names, value in _SIZES if names.fullmatch(plain)), None)
    return None


def _is_special(name: str, default: Any) -> bool:
    """Returns whether a field is a token id among the tokens of the checks, or beyond the small vocabulary."""
    number = isinstance(default, int) and not isinstance(default, bool)
    return number and _TOKEN.fullmatch(name) is not None and default >= TOKENS[0]


def _defaults(config_class: type[PretrainedConfig]) -> dict[str, Any]:
    """Returns the fields of a config class with their defaults; None for a field without a default.

    transformers makes a dataclass of each config class, and leaves a constructor that a class brings of its own:
    fields of such a class are its arguments, and what it hands on are those of the next class.
    """
    if not dataclasses.is_dataclass(config_class):
        return _parameters(config_class)[0]
    found: dict[str, Any] = {}
    for base in config_class.__mro__:
        if _has_own_constructor(base):
            own, more = _parameters(base)
            found = own | found
            if not more:
                return found
    for field in dataclasses.fields(config_class):
        made = field.default_factory() if field.default_factory is not dataclasses.MISSING else None
        found.setdefault(field.name, made if field.default is dataclasses.MISSING else field.default)
    return found


def _has_own_constructor(base: type) -> bool:
    """Returns whether somebody wrote the constructor of a config class: those of dataclasses are made."""
    constructor = vars(base).get("__init__")
    made = getattr(inspect.unwrap(constructor), "__code__", None) if constructor else None
    return made is not None and made.co_filename != "<string>"


def _parameters(config_class: type) -> tuple[dict[str, Any], bool]:
    """Returns the arguments of a class's constructor with their defaults, and whether it hands others on."""
    _, *parameters = inspect.signature(config_class.__init__).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    found = {p.name: None if p.default is p.empty else p.default for p in named}
    return found, len(named) < len(parameters)


def _parts(config_class: type[PretrainedConfig]) -> dict[str, type[PretrainedConfig]]:
    """Returns the config classes of the parts of a composite config (text, vision), by name."""
    from transformers import AutoConfig, PretrainedConfig

    found = {}
    for name, part in (getattr(config_class, "sub_configs", None) or {}).items():
        if part is AutoConfig or not (isinstance(part, type) and issubclass(part, PretrainedConfig)):
            default = _default_part(config_class, name)
            if default is None:
                continue
            part = type(default)
        found[name] = part
    return found


def _default_part(config_class: type[PretrainedConfig], name: str) -> Any:
    """Returns the part that a composite config has by default, or None if its defaults are inconsistent."""
    try:
        return getattr(config_class(), name, None)
    except Exception:  # each class validates in its own way
        return None


def _text(config: PretrainedConfig) -> PretrainedConfig:
    return config.get_text_config(decoder=True)


def _kinds_of_full_depth(config_class: type[PretrainedConfig], small: PretrainedConfig) -> dict[str, list[str]]:
    """Returns repeating lists of layer kinds where the small depth has one kind and the full depth several."""
    found = {}
    try:
        full = _text(config_class())
    except Exception:  # a class without defaults that fit: nothing to compare with
        return {}
    for name in _LAYER_KINDS:
        few, many = getattr(_text(small), name, None), getattr(full, name, None)
        if few and many and len(set(few)) == 1 and len(set(many)) > 1:
            kinds = list(dict.fromkeys(many))
            found[name] = [kinds[index % len(kinds)] for index in range(len(few))]
    return found
