"""Reads DeepSpeed's config, and refuses what would be wrong or is not proven with a scheduled model."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from megasched.errors import ConfigError, did_you_mean
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
    "expert_parallel.enabled": (False, "AutoEP replaces the experts, which the schedule has placed"),
}
# Where "auto" is DeepSpeed's own word; elsewhere it stands for what HF's Trainer fills in.
_AUTO = {"pipeline.stages", "data_types.keep_in_fp32_modules"}
# Read by deepspeed.initialize itself, not by its DeepSpeedConfig.
_READ_BEFORE = {"sequence_parallel_size", "data_parallel_size"}
# They compute by whole tensors, of which a TP rank has parts.
_OF_WHOLE_TENSORS = ("lamb", "onebitlamb", "muon")


class _Recording(dict[str, Any]):
    """Keeps a config, and which of its keys DeepSpeed has asked for."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(copy.deepcopy(dict(config)))
        self.asked = set(_READ_BEFORE)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)


def read_config(config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Returns DeepSpeed's config as a mapping of its own.

    Raises:
        ConfigError: the file can't be read, or a value can't be used with a scheduled model; names every such key.
    """
    if not isinstance(config, str | Path | Mapping):
        raise ConfigError(f"config= is {type(config).__name__}: give DeepSpeed's config, or its JSON file")
    found = read_json(Path(config), _CONFIG, dict) if isinstance(config, str | Path) else dict(config)
    problems = [
        f"{key} = {value!r}: {why}; leave it out"
        for key, (no, why) in REFUSED.items()
        if (value := value_at(found, key)) and value != no
    ]
    if not isinstance(zero := found.get("zero_optimization", {}), Mapping):
        problems.append(f'zero_optimization = {zero!r}: write {{"stage": 1}}, or another stage')
    what = "HF's Trainer fills that in, which is not in use; give a value, or leave it out for DeepSpeed's default"
    problems += [f"{key} = 'auto': {what}" for key in _autos(found) if key not in _AUTO]
    refuse_all(problems, "a scheduled model")
    return found


def _autos(config: Mapping[str, Any], below: str = "") -> Iterator[str]:
    """Yields the dotted keys whose value is ``auto``."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _autos(value, f"{below}{key}.")
        elif value == "auto":
            yield f"{below}{key}"


def check_by_deepspeed(deepspeed: Any, config: Mapping[str, Any], mpu: Any, tp: int) -> None:
    """Has DeepSpeed read its config before anything is built, and refuses what it would read past.

    Args:
        mpu: Megatron's groups, which tell the size of a batch.
        tp: ranks in the TP group.

    Raises:
        ConfigError: DeepSpeed can't use a value, or does not know a key; or an optimizer takes whole tensors.
    """
    recording = _Recording(config)
    try:
        deepspeed.DeepSpeedConfig(recording, mpu)
    except Exception as error:  # whatever its checks raise: asserts, pydantic's, its own
        raise ConfigError(f"DeepSpeed refuses its config: {error or repr(error)}") from error
    problems = [
        f"{key}: DeepSpeed {deepspeed.__version__} does not know this key, and would go on without it"
        + (did_you_mean(get_close_matches(key, sorted(recording.asked), n=1)) or "; leave it out")
        for key in config
        if key not in recording.asked
    ]
    optimizer = value_at(config, "optimizer.type")
    if tp > 1 and str(optimizer).lower() in _OF_WHOLE_TENSORS:
        what = f"optimizer.type = {optimizer!r}: it goes by norms or products of whole tensors"
        problems.append(f"{what}, and each of {tp} TP ranks has parts of them; take Adam, or TP 1")
    refuse_all(problems, "a scheduled model")


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
