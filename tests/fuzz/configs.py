"""Small models of an architecture with some fields of the config changed at random, which plain HF trains."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import torch

from megasched.definition.small_models.shrink import TOKENS
from megasched.definition.small_models.small_models import small_config, write_model
from megasched.verify.plain.loading import without_cache

# Fields that say nothing of what is computed, that the checks have set, or whose values draw random numbers.
_LEFT = (
    *("use_cache", "return_dict", "is_encoder_decoder", "is_decoder", "add_cross_attention", "torchscript"),
    *("tie_encoder_decoder", "architectures", "dtype", "model_type", "transformers_version", "problem_type"),
    *("vocab_size", "num_hidden_layers", "n_layer", "n_layers", "max_position_embeddings", "n_positions"),
    *("initializer_range", "initializer_factor", "init_std", "chunk_size_feed_forward", "gradient_checkpointing"),
    *("experts_implementation", "auto_map"),
)
_LEFT_WITH = ("dropout", "_drop", "drop_", "pdrop", "layerdrop", "jitter", "token_id", "output_attentions")
_LEFT_WITH += ("output_hidden_states", "attn_implementation", "quantization", "label")
_ACTIVATIONS = ("gelu", "relu", "silu", "gelu_pytorch_tanh", "relu2", "quick_gelu", "tanh", "gelu_new")
_SCALED = {"factor": 4.0, "original_max_position_embeddings": 32}
_ROTARY: tuple[dict[str, Any], ...] = (
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", **_SCALED},
    {"rope_type": "llama3", **_SCALED, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
)
MOST_PARAMETERS = 4_000_000
TRIES = 12
Path = tuple[str, ...]


def write_changed(model_type: str, seed: int, folder: str) -> list[str]:
    """Writes a small model with three to five changes that plain HF trains with; in a rank.

    Returns:
        The changes, as ``name=value``; empty where plain HF trains with none of them, and nothing is written.
    """
    draw = random.Random(f"{model_type} {seed}")
    config = small_config(model_type)
    values, found = config.to_dict(), []
    by_name: dict[Path, list[Any]] = {}
    for path, value in _changes(values):
        by_name.setdefault(path, []).append(value)
    names = list(by_name)
    draw.shuffle(names)
    wanted = draw.choice((3, 4, 5))
    for path in names[:TRIES]:
        value = draw.choice(by_name[path])
        changed = _with(values, path, value)
        if len(found) < wanted and _trains(type(config), changed):
            values = changed
            found.append(f"{'.'.join(path)}={value!r}")
    if found:
        write_model(type(config).from_dict(copy.deepcopy(values)), folder)
    return found


def _changes(values: dict[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields the paths of fields, each with another value, as often as there are values to try."""
    for name, value in values.items():
        path = (*above, name)
        if name in _LEFT or any(part in name for part in _LEFT_WITH):
            continue
        if isinstance(value, dict) and "rope_type" in value:
            kept = {key: value[key] for key in ("rope_theta", "partial_rotary_factor") if key in value}
            yield from ((path, {**kept, **other}) for other in _ROTARY)
        elif isinstance(value, dict):
            yield from _changes(value, path)
        else:
            # No heads, or a width by a factor of 0, are no model.
            counted = "head" in name or "factor" in name
            yield from ((path, other) for other in _others(name, value) if other or other is False or not counted)


def _others(name: str, value: Any) -> list[Any]:
    """Returns other values of a field, by the kind of its value and the words in its name."""
    of_width = any(word in name for word in ("size", "dim", "rank"))
    match value:
        case bool():
            return [not value]
        case str():
            return [other for other in _ACTIVATIONS if other != value] if "act" in name else []
        case int():
            others = (value // 2, value + 8) if of_width else (0, 1, 2)
            return [number for number in (*others, value + 1, value * 2) if number != value]
        case float():
            return [number for number in (0.0, 1.0, value / 2, value * 2 or 3.0) if number != value]
        case list() if value and all(isinstance(one, str | bool) for one in value):
            return [value[::-1], [value[0]] * len(value), [value[-1]] * len(value)]
        case None:
            return _in_place_of_none(name)
    return []


def _in_place_of_none(name: str) -> list[Any]:
    if any(word in name for word in ("window", "chunk")):
        return [5]
    if any(word in name for word in ("cap", "clip", "clamp", "limit")):
        return [0.5, 2.0]
    if any(word in name for word in ("scal", "mult", "factor", "coef")):
        return [0.7, 2.0]
    of_whole_numbers = any(word in name for word in ("head", "rank", "dim", "size", "group", "expert"))
    return [2, 4, 8, 16] if of_whole_numbers else [True]


def _with(values: dict[str, Any], path: Path, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(values)
    level = changed
    for name in path[:-1]:
        level = level[name]
    level[path[-1]] = value
    return changed


def _trains(config_class: Any, values: dict[str, Any]) -> bool:
    """Returns whether plain HF makes the model and trains it, small and with finite numbers."""
    from transformers import AutoModelForCausalLM

    ids = torch.randint(*TOKENS, (2, 64), generator=torch.Generator().manual_seed(1))
    try:
        config = config_class.from_dict(copy.deepcopy(values))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if sum(parameter.numel() for parameter in model.parameters()) > MOST_PARAMETERS:
            return False
        without_cache(model)  # some decoders without an encoder can't be trained with one
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    except Exception:  # of whatever kind: a change may be any nonsense
        return False
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return all(bool(tensor.isfinite().all()) for tensor in (loss, *gradients))
