"""Tells how to train beyond ``max_position_embeddings``, with which some rotary embeddings compute."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megasched.definition.config_file import Path

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ORIGINAL = "original_max_position_embeddings"
# Their classes take the limit for the length of pretraining, where the config does not say it.
WITH_ORIGINAL = ("llama3", "yarn", "longrope")
# They take limit / length of pretraining for the factor, where the config does not say it.
WITH_FACTOR = ("yarn", "longrope")
DYNAMIC = "dynamic"


def remedy(config: PretrainedConfig, field: str, sequence: int) -> str:
    """Returns how to train a model with rotary positions on sequences that are longer than its limit.

    Args:
        field: name of the limit in the config of the decoder.
    """
    text = config.get_text_config(decoder=True)
    part = next((f"{name}." for name, value in vars(config).items() if value is text), "")
    limit, sets = getattr(text, field), list(_sets(text))
    dynamic = [path for path, rope in sets if _kind(rope) == DYNAMIC]
    if dynamic:
        fixed = {"rope_type": "yarn", "factor": float(math.ceil(sequence / limit)), ORIGINAL: limit}
        override = f"{part}{'.'.join(dynamic[0])}={json.dumps(fixed)}"
        return (
            f"under rope_type dynamic the frequencies follow from {field} and from the longest sequence seen, so "
            f"that another {field} makes another model; take shorter sequences, or a scaling of fixed length, "
            f"which is another model as well: --hf-override {part}{field}={sequence} '{override}'"
        )
    kept = [f"{part}{'.'.join(path)}.{name}={value}" for path, name, value in _kept(text, limit)]
    why = " (the frequencies would follow from it otherwise)" if kept else ""
    return f"to train beyond, say --hf-override {' '.join([f'{part}{field}={sequence}', *kept])}{why}"


def is_limit_alone(config: PretrainedConfig) -> bool:
    """Returns whether positions are rotary and do not depend on how many there may be."""
    kinds = [_kind(rope) for _, rope in _sets(config.get_text_config(decoder=True))]
    return bool(kinds) and not {DYNAMIC, *WITH_FACTOR}.intersection(kinds)


def _kept(config: PretrainedConfig, limit: int) -> Iterator[tuple[Path, str, float]]:
    """Yields (path, name, value) of each rotary parameter that a class would derive from another limit."""
    for path, rope in _sets(config):
        own = rope.get(ORIGINAL) != limit or hasattr(config, ORIGINAL)
        if _kind(rope) in WITH_ORIGINAL and not own:
            yield path, ORIGINAL, limit
        if _kind(rope) in WITH_FACTOR and rope.get("factor") is None:
            yield path, "factor", limit / rope[ORIGINAL]


def _kind(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type", "default"))


def _sets(config: PretrainedConfig) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yields the path and the rotary parameters of each set: one for all layers, or one for each kind."""
    found = vars(config).get("rope_parameters") or {}
    kinds = {kind: rope for kind, rope in found.items() if isinstance(rope, dict)}
    if found and not kinds:
        yield ("rope_parameters",), found
    for kind, rope in kinds.items():
        yield ("rope_parameters", kind), rope
