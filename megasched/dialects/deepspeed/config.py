"""Reads DeepSpeed's config, and refuses what would be wrong or is not proven with a scheduled model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megasched.errors import ConfigError
from megasched.reading.files import Expected
from megasched.reading.json_file import read_json

_CONFIG = Expected("DeepSpeed's config", flag="config=")
_ULYSSES = "the sequence stays whole under this target"
_GROUPS = "it makes groups of its own within data parallelism, which are not proven with Megatron's"
_CODE = "it changes the model's code or weights, after the schedule has been built"

# Key of the config -> (value that means no, why a scheduled model can't have another).
# 0 and what is empty mean no, too.
REFUSED: dict[str, tuple[Any, str]] = {
    "tensor_parallel.autotp_size": (1, "the schedule has cut the model; AutoTP would cut it again"),
    "sequence_parallel_size": (1, _ULYSSES),
    "zero_optimization.mics_shard_size": (-1, _GROUPS),
    "zero_optimization.zero_hpz_partition_size": (1, _GROUPS),
    "zero_optimization.zero_quantized_weights": (False, "its rounding is not compared with anything"),
    "zero_optimization.zero_quantized_gradients": (False, "its rounding is not compared with anything"),
    "hybrid_engine.enabled": (False, _CODE),
    "compression_training": (None, _CODE),
    "compile.deepcompile": (False, _CODE),
    "amp.enabled": (False, "Apex's own casts are not compared with anything: use bf16 or fp16"),
    "sparse_attention": (None, _CODE),
    "progressive_layer_drop.enabled": (False, _CODE),
}


def read_config(config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Returns DeepSpeed's config as a mapping of its own.

    Raises:
        ConfigError: the file can't be read, or a value can't be used with a scheduled model; names every such key.
    """
    found = read_json(Path(config), _CONFIG, dict) if isinstance(config, str | Path) else dict(config)
    problems = [
        f"{key} = {value!r}: {why}; leave it out"
        for key, (no, why) in REFUSED.items()
        if (value := value_at(found, key)) and value != no
    ]
    refuse_all(problems, "a scheduled model")
    return found


def refuse_all(problems: Sequence[str], whose: str) -> None:
    """Raises ConfigError with all problems of a config, if there are any; ``whose`` is what does not have them."""
    if problems:
        raise ConfigError("\n  ".join([f"DeepSpeed's config asks for what {whose} does not have:", *problems]))


def value_at(config: Mapping[str, Any], key: str) -> Any:
    """Returns the value at a dotted key of the config; None where it is not given."""
    found: Any = config
    for name in key.split("."):
        if not isinstance(found, Mapping) or name not in found:
            return None
        found = found[name]
    return found


def zero_stage(config: Mapping[str, Any]) -> int:
    """Returns the stage of ZeRO that a config asks for."""
    return int(value_at(config, "zero_optimization.stage") or 0)
