"""Inspects a checkpoint without the model and without unpickling objects that could run code."""

from __future__ import annotations

import enum
import re
from argparse import Namespace
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasched.definition.config_check import CONFIG
from megasched.errors import ConfigError
from megasched.reading.json_file import read_json
from megasched.weights.torch_dist.reader import HF_FILES, OPTIMIZER, CheckpointTensor, TorchDist, checkpoint_folder

# Of the arguments of the run that wrote it, those that say at which layout.
LAYOUT = {
    "TP": "tensor_model_parallel_size",
    "SP": "sequence_parallel",
    "PP": "pipeline_model_parallel_size",
    "VPP": "virtual_pipeline_model_parallel_size",
    "CP": "context_parallel_size",
    "EP": "expert_model_parallel_size",
    "DP": "data_parallel_size",
}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class TensorGroup:
    """Describes tensors whose names differ only in numbers.

    Attributes:
        name: with ``*`` for the numbers that differ.
        count: number of tensors.
        parameters: number of parameters of all of them together.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    parameters: int
    bytes: int


@dataclass(frozen=True)
class Inspection:
    """Describes the content of a checkpoint.

    Attributes:
        folder: of the checkpoint.
        iteration: after which it was written; 0 for imported weights.
        layout: at which it was written: TP, SP, ...; empty for imported weights.
        model_type: of its HF config; empty if the checkpoint has none.
        tensors: of the model.
        optimizer: states of the optimizer -> bytes.
        objects: keys of objects that are no tensors.
        files: name -> bytes.
        problems: files that are missing or cut short.
        args: all arguments of the run that wrote it; plain values, others as text.
    """

    folder: Path
    iteration: int
    layout: dict[str, Any]
    model_type: str
    tensors: list[TensorGroup]
    parameters: int
    bytes: int
    optimizer: dict[str, int]
    objects: list[str]
    files: dict[str, int]
    problems: list[str]
    args: dict[str, Any]


def inspect_checkpoint(load: str | Path) -> Inspection:
    """Inspects a checkpoint.

    Args:
        load: a ``--save`` folder (whose last checkpoint is used) or one of its checkpoints.

    Raises:
        CheckpointError: there is none, or its metadata can't be read.
    """
    folder = checkpoint_folder(load)
    checkpoint = TorchDist(folder)
    problems = checkpoint.problems()
    common = {} if problems else checkpoint.common
    args = {name: _plain(value) for name, value in sorted(vars(common.get("args", Namespace())).items())}
    model = checkpoint.model
    groups = _grouped(model)
    return Inspection(
        folder=folder,
        iteration=int(common.get("iteration", 0)),
        layout={short: args[name] for short, name in LAYOUT.items() if name in args},
        model_type=_model_type(folder),
        tensors=groups,
        parameters=sum(group.parameters for group in groups),
        bytes=sum(group.bytes for group in groups),
        optimizer=_optimizer(checkpoint, model),
        objects=checkpoint.objects,
        files={path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()},
        problems=problems,
        args=args,
    )


def _grouped(model: dict[str, CheckpointTensor]) -> list[TensorGroup]:
    alike: dict[tuple[Any, ...], list[CheckpointTensor]] = defaultdict(list)
    for name, tensor in model.items():
        alike[_NUMBER.sub("*", name), tensor.shape, tensor.dtype].append(tensor)
    return [
        TensorGroup(
            name if len(tensors) > 1 else tensors[0].key,
            len(tensors),
            shape,
            str(dtype).removeprefix("torch."),
            sum(tensor.nbytes // dtype.itemsize for tensor in tensors),
            sum(tensor.nbytes for tensor in tensors),
        )
        for (name, shape, dtype), tensors in alike.items()
    ]


def _optimizer(checkpoint: TorchDist, model: dict[str, CheckpointTensor]) -> dict[str, int]:
    """Returns the bytes of each optimizer state, e.g. ``exp_avg``.

    A state's name comes before the name of its parameter, or after that of a bucket of adjacent parameters.
    """
    found: dict[str, int] = defaultdict(int)
    for key, tensor in checkpoint.tensors.items():
        prefix = OPTIMIZER.match(key)
        if prefix is not None:
            state = key[prefix.end() :].removeprefix("state.")
            kind, _, name = state.partition(".")
            found[kind if name in model else state.rpartition(".")[2]] += tensor.nbytes
    return dict(found)


def _model_type(folder: Path) -> str:
    try:
        return read_json(folder / HF_FILES / "config.json", CONFIG, {"model_type": str})["model_type"]
    except ConfigError:
        return ""  # of another tool, or written by an older release


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return str(value)
