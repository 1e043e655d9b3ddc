"""Exports a Megatron checkpoint as an HF folder, in one CPU process.

The checkpoint holds HF's names and shapes already (``megasched/trainer/checkpoint/entries.py``), so the only
conversion is transformers' own on saving. The definition is built on meta, for its names alone.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megasched.definition.build import build_definition, kept_in_float32, load_config
from megasched.definition.objectives import find_objective
from megasched.errors import CheckpointError, ConfigError
from megasched.files import check_room, whole_folder
from megasched.language.lora import A, B, Lora
from megasched.reading.files import MIB, Expected, is_regular
from megasched.reading.hf_source import check_hf_model
from megasched.reading.json_file import read_json
from megasched.weights.hf.conversions import Conversions
from megasched.weights.hf.files import config_of_export, copy_hf_files, with_nested
from megasched.weights.hf.hub import local_folder
from megasched.weights.hf.writer import Output, write_weights
from megasched.weights.lazy import LazyTensor, Narrowed
from megasched.weights.lora import CONFIG as LORA_CONFIG
from megasched.weights.lora import WEIGHTS as LORA_WEIGHTS
from megasched.weights.lora import merged, read_adapter_config, save_adapter
from megasched.weights.source import canonical_names, compare_names, padded_lengths
from megasched.weights.torch_dist.reader import HF_FILES, TorchDist, checkpoint_folder
from megasched.weights.universal import UniversalCheckpoint, is_universal

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

ADAPTER_CONFIG = Expected("PEFT's config of the adapters", CheckpointError, most=16 * MIB)
ADAPTER_FORM = {
    "r": int,
    "lora_alpha": float,
    "lora_dropout": float,
    "use_rslora": bool,
    "fan_in_fan_out": bool,
    "target_modules": [str],
    "rank_pattern": {str: int},
    "alpha_pattern": {str: float},
}
# Told how many bytes there will be, it gives a function that is told how many more were written.
Progress = Callable[[int], AbstractContextManager[Callable[[int], Any]]]
type Checkpoint = TorchDist | UniversalCheckpoint
COUNTS = (
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "mtp_num_hidden_layers",
    "mtp_num_layers",
    "num_mtp_modules",
)


@dataclass(frozen=True)
class Exported:
    """Describes the folder that was written.

    Attributes:
        checkpoint: that was read.
        iteration: of the run, 0 for imported weights.
        architecture: class of the model.
        adapter: it is a LoRA adapter alone.
        tensors, bytes: of the weights.
        absent: counts of layers in the config that the class lacks, e.g. ``num_nextn_predict_layers = 1``;
            they are 0 in the exported config.
        auto_class: class of transformers that loads the folder with ``trust_remote_code``, of a class that comes
            with the model; empty for one of transformers' own.
    """

    checkpoint: Path
    output: Path
    iteration: int
    architecture: str
    dtype: str
    tensors: int
    bytes: int
    adapter: bool = False
    absent: tuple[str, ...] = ()
    auto_class: str = ""


def export_weights(
    load: str | Path,
    output: str | Path,
    *,
    progress: Progress,
    hf_model: str | Path | None = None,
    adapter: bool = False,
    dtype: torch.dtype | None = None,
    max_shard_size: int,
    objective: str | None = None,
    trust_remote_code: bool = False,
) -> Exported:
    """Writes an HF folder that ``from_pretrained`` loads.

    Args:
        load: a ``--save`` folder or one of its checkpoints, or a universal checkpoint of DeepSpeed's.
        hf_model: folder or hub id, for config and tokenizer; by default those that the run kept in the checkpoint.
        adapter: write only the weights that LoRA trained, in PEFT's form, instead of the merged model.
        dtype: of the parameters; that of the checkpoint by default. Buffers keep theirs, and parameters that
            transformers keeps in float32 beside weights of this dtype are written so.
        max_shard_size: bytes in a file.
        objective: training task of the model, if the checkpoint does not name it.

    Raises:
        CheckpointError: the checkpoint is damaged, or does not fit the config.
        ConfigError: there is no config, or the output can't be written.
    """
    checkpoint: Checkpoint = (
        UniversalCheckpoint(Path(load)) if is_universal(Path(load)) else TorchDist(checkpoint_folder(load))
    )
    checkpoint.check_files()
    files = _hf_files(checkpoint.folder, hf_model)
    config = load_config(files, trust_remote_code=trust_remote_code)
    trained_for = objective or getattr(checkpoint.common.get("args"), "objective", None)
    build = partial(build_definition, objective=find_objective(trained_for), trust_remote_code=trust_remote_code)
    definition = build(config)
    config_of_lora = _lora_config(checkpoint.folder)
    adapters = read_adapter_config(config_of_lora) if config_of_lora else {}
    tensors = definition_tensors(checkpoint, definition, adapters)
    if adapter:
        return _export_adapter(checkpoint, Path(output), tensors, definition, config_of_lora, dtype)
    outputs = _outputs(merged(tensors, adapters), definition, dtype)
    target, size = Path(output), sum(item.nbytes for item in outputs)
    with whole_folder(target) as folder:
        check_room(folder, size)
        written = dtype or _usual_dtype(outputs)
        counted, absent = without_absent_layers(config, definition, build)
        exported = config_of_export(counted, type(definition).__name__, written)
        (folder / "config.json").write_text(exported.to_json_string(use_diff=True))
        copy_hf_files(files, folder)
        with progress(size) as advance:
            write_weights(folder, outputs, max_shard_size, advance)
    found = _exported(checkpoint, target, type(definition).__name__, written, len(outputs), size)
    stock = type(definition).__module__.startswith("transformers.")
    return replace(found, absent=absent, auto_class="" if stock else find_objective(trained_for).auto_class)


def definition_tensors(
    checkpoint: Checkpoint, definition: PreTrainedModel, adapters: Mapping[str, Lora]
) -> dict[str, LazyTensor]:
    """Returns the tensors of a definition from a checkpoint's; a tied one by the name that transformers keeps.

    Args:
        adapters: path of each linear with a LoRA adapter -> the adapter; its tensors are included.

    Raises:
        CheckpointError: lists every name that is missing, left over, or of another shape.
    """
    stored, holder = checkpoint.model, str(checkpoint.folder)
    args = checkpoint.common.get("args")
    canonical = canonical_names(definition)
    state = definition.state_dict()
    wanted = {name: tuple(state[name].shape) for name in state if canonical.get(name, name) == name}
    for path, lora in adapters.items():
        outputs, inputs = wanted[f"{path}.weight"][:: -1 if lora.fan_in_fan_out else 1]
        wanted |= {f"{path}.{A}.weight": (lora.rank, inputs), f"{path}.{B}.weight": (outputs, lora.rank)}
    left = {name for name in set(stored) - set(wanted) if canonical.get(name, name) == name}  # but for ties
    compare_names(holder, set(wanted) - set(stored), left)
    vocabulary = getattr(definition.config.get_text_config(decoder=True), "vocab_size", None)
    found: dict[str, LazyTensor] = {}
    wrong = []
    for name, shape in wanted.items():
        tensor = stored[name]
        padded = (
            tensor.shape != shape
            and shape[:1] == (vocabulary,)
            and tensor.shape[1:] == shape[1:]
            and tensor.shape[0] in padded_lengths(shape[0], args)
        )
        if tensor.shape != shape and not padded:
            wrong.append(f"    {name}: {list(tensor.shape)}, the config makes it {list(shape)}")
        kept = definition.all_tied_weights_keys.get(name, name)  # of a tie, transformers writes one name
        # Megatron pads the vocabulary, for the TP ranks to have equal parts of it.
        found[kept] = Narrowed(tensor, 0, 0, shape[0]) if padded else tensor
    if wrong:
        raise CheckpointError("\n".join([f"{holder} does not fit the config; of another shape:", *wrong]))
    return found


def _lora_config(checkpoint: Path) -> dict[str, Any] | None:
    """Returns PEFT's config of the run that wrote the checkpoint, or None if it adapted nothing."""
    path = checkpoint / HF_FILES / LORA_CONFIG
    return read_json(path, ADAPTER_CONFIG, ADAPTER_FORM) if os.path.lexists(path) else None


def _export_adapter(
    checkpoint: Checkpoint,
    output: Path,
    tensors: Mapping[str, LazyTensor],
    definition: PreTrainedModel,
    config: Mapping[str, Any] | None,
    dtype: torch.dtype | None,
) -> Exported:
    if config is None:
        raise ConfigError(f"{checkpoint.folder}: no LoRA adapters in it; leave --adapter out to export the model")
    with whole_folder(output) as folder:
        count = save_adapter(folder, tensors, config, dtype)
        size = (folder / LORA_WEIGHTS).stat().st_size
    written = dtype or tensors[next(name for name in tensors if f".{A}." in name)].dtype
    return replace(_exported(checkpoint, output, type(definition).__name__, written, count, size), adapter=True)


def _exported(
    checkpoint: Checkpoint, output: Path, name: str, dtype: torch.dtype, count: int, size: int
) -> Exported:
    iteration = int(checkpoint.common.get("iteration", 0))
    return Exported(checkpoint.folder, output, iteration, name, str(dtype).removeprefix("torch."), count, size)


def _outputs(
    tensors: Mapping[str, LazyTensor], definition: PreTrainedModel, dtype: torch.dtype | None
) -> list[Output]:
    conversions = Conversions(definition)
    buffers = {name for name, _ in definition.named_buffers()}
    float32 = frozenset() if dtype is None else kept_in_float32(definition, dtype, tensors)
    outputs = []
    for group in conversions.groups(tensors):
        keep = dtype is None or buffers.issuperset(group) or not tensors[group[0]].dtype.is_floating_point
        wanted = torch.float32 if float32.issuperset(group) else dtype
        for name, tensor in conversions.original({name: tensors[name] for name in group}).items():
            outputs.append(Output(name, tensor, tensor.dtype if keep else wanted))
    return outputs


def _usual_dtype(outputs: list[Output]) -> torch.dtype:
    return Counter(item.dtype for item in outputs if item.dtype.is_floating_point).most_common(1)[0][0]


def _hf_files(checkpoint: Path, hf_model: str | Path | None) -> Path:
    if hf_model is not None:
        check_hf_model(str(hf_model))
        return local_folder(hf_model, weights=False)
    files = checkpoint / HF_FILES
    if not is_regular(files / "config.json"):
        raise ConfigError(f"{checkpoint}: no HF config was kept in it; name its HF folder with --hf-model")
    if not files.resolve().is_relative_to(checkpoint.resolve()):
        raise ConfigError(f"{files}: it is a link out of the checkpoint; name its HF folder with --hf-model")
    return files


def without_absent_layers(
    config: PretrainedConfig, definition: PreTrainedModel, build: Callable[[PretrainedConfig], PreTrainedModel]
) -> tuple[PretrainedConfig, tuple[str, ...]]:
    """Sets counts of layers for later tokens (multi-token prediction) to 0 if the class lacks these layers.

    transformers ignores the tensors of such layers when it loads (``_keys_to_ignore_on_load_unexpected``), so
    no checkpoint of a run has them, and no export. With a config that still counts them, other programs, and
    transformers' own ``generate(use_mtp=True)``, would look for tensors that are not there.

    If the class has other tensors with counts of 0, the layers are its own, and the counts stay.

    Args:
        definition: of this config.
        build: makes a definition of a config, on meta.

    Returns:
        The config, and the former counts, e.g. ``num_nextn_predict_layers = 1``.
    """
    changed, told = copy.deepcopy(config), []
    for part in with_nested(changed):
        for name in COUNTS:
            count = getattr(part, name, None)
            if isinstance(count, int) and count > 0:
                told.append(f"{part.attribute_map.get(name, name)} = {count}")
                setattr(part, name, 0)
    if not told or build(changed).state_dict().keys() != definition.state_dict().keys():
        return config, ()
    return changed, tuple(told)
