"""Initialises and merges the weights of LoRA adapters, and writes the folder that PEFT reads.

All tensors are whole HF tensors by HF's names: a checkpoint holds ``PATH.weight`` unchanged,
``PATH.lora_A.weight`` [r, in] and ``PATH.lora_B.weight`` [out, r]. PEFT's ``adapter_config.json`` describes how
they are added.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megasched.definition.objectives import objective_of
from megasched.errors import CheckpointError
from megasched.language.lora import A, B, Lora, adapted, adapter_names, is_conv1d
from megasched.language.module_paths import is_within
from megasched.language.schedule import Schedule
from megasched.plan.placement import Placement
from megasched.weights.lazy import Box, Composed, LazyTensor, cast, whole
from megasched.weights.random_init import parameter_seed
from megasched.weights.source import WeightSource

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # PEFT's own modules around the model
# Objective -> PEFT's name for it; PEFT has a plain model for all others.
_TASKS = {"causal_lm": "CAUSAL_LM", "seq2seq_lm": "SEQ_2_SEQ_LM"}


def adapter_config(schedule: Schedule, base_model: str) -> dict[str, Any] | None:
    """Returns PEFT's ``adapter_config.json`` of a schedule, or None if it adapts nothing.

    Args:
        schedule: a checked one; a PEFT adapter has one dropout and one scaling rule for all.
        base_model: folder or hub id of the model that is adapted (``--hf-model``).
    """
    calls = adapted(schedule.records)
    if not calls:
        return None
    path, first = next(iter(calls.items()))
    unfrozen = dict.fromkeys(record.path for record in schedule.records if record.primitive == "unfreeze")
    rank, alpha = first["rank"], first["alpha"]
    return {
        "peft_type": "LORA",
        "task_type": _TASKS.get(objective_of(schedule.mod).name),
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "bias": "none",
        "fan_in_fan_out": is_conv1d(schedule[path].mod),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": first["dropout"],
        "use_rslora": first["use_rslora"],
        "target_modules": list(calls),
        "rank_pattern": {path: call["rank"] for path, call in calls.items() if call["rank"] != rank},
        "alpha_pattern": {path: call["alpha"] for path, call in calls.items() if call["alpha"] != alpha},
        # The outermost: PEFT keeps copies of them, and looks into none for another.
        "modules_to_save": [
            one for one in unfrozen if not any(is_within(one, other) for other in unfrozen if other != one)
        ]
        or None,
    }


def read_adapter_config(config: Mapping[str, Any]) -> dict[str, Lora]:
    """Returns the adapter of each adapted linear by its path, from a result of ``adapter_config``."""
    return {
        path: Lora(
            rank=config["rank_pattern"].get(path, config["r"]),
            alpha=config["alpha_pattern"].get(path, config["lora_alpha"]),
            dropout=config["lora_dropout"],
            use_rslora=config["use_rslora"],
            fan_in_fan_out=config["fan_in_fan_out"],
        )
        for path in config["target_modules"]
    }


def merge(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, lora: Lora) -> torch.Tensor:
    """Returns the weight of a linear that computes the same as the adapted one, in the weight's dtype.

    The product is added in float32.

    Args:
        weight: [out, in], or [in, out] with ``lora.fan_in_fan_out``.
        a: [r, in].
        b: [out, r].
    """
    added = (b.float() @ a.float()) * lora.scaling
    return (weight.float() + (added.t() if lora.fan_in_fan_out else added)).to(weight.dtype)


@dataclass(frozen=True)
class Merged(Composed):
    """Represents the weight of an adapted linear with its adapter merged; its sources are ``merge``'s inputs."""

    lora: Lora

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sources[0].shape

    @property
    def where(self) -> str:
        return self.sources[0].where

    def read(self, box: Box) -> torch.Tensor:
        outputs, inputs = reversed(box) if self.lora.fan_in_fan_out else box
        weight, a, b = self.sources
        every = (0, self.lora.rank)
        return merge(weight.read(box), a.read((every, inputs)), b.read((outputs, every)), self.lora)


def merged(tensors: Mapping[str, LazyTensor], adapters: Mapping[str, Lora]) -> dict[str, LazyTensor]:
    """Returns every tensor of the model by its HF name, with adapters merged.

    Args:
        tensors: of a checkpoint, including those of adapters.
        adapters: result of ``read_adapter_config``.

    Raises:
        CheckpointError: adapters are missing.
    """
    _check_adapters(tensors, adapters)
    theirs = set(adapter_names(adapters))
    found = {name: tensor for name, tensor in tensors.items() if name not in theirs}
    for path, lora in adapters.items():
        sources = tuple(tensors[f"{path}{part}.weight"] for part in ("", f".{A}", f".{B}"))
        found[f"{path}.weight"] = Merged(sources, lora)
    return found


def save_adapter(
    folder: Path, tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], dtype: torch.dtype | None = None
) -> int:
    """Writes a folder that ``PeftModel.from_pretrained(model, folder)`` loads.

    Args:
        folder: exists.
        tensors: of a checkpoint; only adapters and the parameters that were trained beside them are read.
        config: result of ``adapter_config``.
        dtype: written dtype; that of the tensors by default.

    Returns:
        The number of tensors.

    Raises:
        CheckpointError: adapters are missing.
    """
    from safetensors.torch import save_file

    adapters = read_adapter_config(config)
    _check_adapters(tensors, adapters)
    beside = tuple(f"{path}." for path in config["modules_to_save"] or ())
    names = [*adapter_names(adapters), *(name for name in tensors if beside and name.startswith(beside))]
    values = {name: tensors[name].read(whole(tensors[name].shape)).contiguous() for name in names}
    found = {_PREFIX + name: cast(value, dtype or value.dtype, name) for name, value in values.items()}
    save_file(found, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(dict(config), indent=2) + "\n")
    return len(found)


def _check_adapters(names: Collection[str], adapters: Mapping[str, Lora]) -> None:
    missing = [name for name in adapter_names(adapters) if name not in names]
    if missing:
        raise CheckpointError(
            f"the checkpoint has no {missing[0]} (of {len(missing)} that are missing): it was not written by a "
            "run whose schedule adapts these linears"
        )


def initial_value(name: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Returns the whole parameter with PEFT's initial values, which depend on its name and the seed alone.

    Returns:
        float32, CPU: Kaiming's uniform for ``lora_A``, zeros for ``lora_B``.
    """
    value = torch.zeros(shape)
    if name.endswith(f".{A}.weight"):
        generator = torch.Generator().manual_seed(parameter_seed(seed, name))
        torch.nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
    return value


class AdaptedSource:
    """Provides weights of a model with adapters, which are initialised; all others come from another source.

    Args:
        base: source of the model's weights.
        names: of the adapters' parameters.
        seed: Megatron's ``--seed``; without its trainer that of a model that has its weights when it is built.
    """

    def __init__(self, base: WeightSource, names: Collection[str], seed: int = 0) -> None:
        self._base, self._names, self._seed = base, frozenset(names), seed

    def local(self, placement: Placement, rank: int, size: int) -> torch.Tensor:
        """See ``WeightSource.local``."""
        if placement.name not in self._names:
            return self._base.local(placement, rank, size)
        piece = placement.shard(initial_value(placement.name, placement.shape, self._seed), rank, size)
        return piece.clone()

    def buffer(self, name: str) -> torch.Tensor | None:
        """See ``WeightSource.buffer``."""
        return self._base.buffer(name)

    def check(self, names: Collection[str]) -> None:
        """Checks names like ``WeightSource.check``; adapters are never missing."""
        self._base.check(set(names) - self._names)
