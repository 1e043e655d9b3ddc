"""Lists the safetensors files of a folder, and the tensors in them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch

from megasched.errors import CheckpointError
from megasched.reading.files import Expected, is_regular, open_regular
from megasched.reading.json_file import read_json
from megasched.reading.safetensors_file import SAFETENSORS, open_safetensors

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
INDEX_FILE = Expected("JSON with a weight_map from tensor to file", CheckpointError, most=1 << 28)
# Weights in formats that are not read. Trainers leave other .bin and .pt files around: those are no weights.
OTHER_FORMATS = ("pytorch_model*", "consolidated*", "tf_model*.h5", "flax_model*.msgpack", "*.gguf")


def has_weights(folder: str | Path) -> bool:
    """Returns whether the folder holds weights in any format, even those that ``list_tensors`` refuses to read.

    It is False for a folder with a config alone, a ``config.json`` file, or a path that doesn't exist.
    """
    return any(any(Path(folder).glob(pattern)) for pattern in ("*.safetensors", INDEX, *OTHER_FORMATS))


def list_tensors(folder: str | Path) -> dict[str, Path]:
    """Returns the safetensors file of each tensor by its name, from ``model.safetensors`` or the shards' index.

    Raises:
        CheckpointError: there are no safetensors weights, the index is damaged, or a shard is missing.
    """
    folder = Path(folder)
    if os.path.lexists(folder / SINGLE):
        with open_safetensors(folder / SINGLE) as file:
            return dict.fromkeys(file.keys(), folder / SINGLE)
    if os.path.lexists(folder / INDEX):
        return _read_index(folder / INDEX)
    others = sorted(path.name for pattern in ("*.safetensors", *OTHER_FORMATS) for path in folder.glob(pattern))
    found = f"it has {', '.join(others)}" if others else "it has no weights"
    raise CheckpointError(
        f"{folder}: no {SINGLE} and no {INDEX}; {found}. Only safetensors are read (pickled weights can run "
        "code); to convert: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
    )


def dtype_names() -> dict[torch.dtype, str]:
    """Returns safetensors' names of torch's dtypes."""
    return {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e5m2: "F8_E5M2",
        torch.float8_e8m0fnu: "F8_E8M0",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint8: "U8",
        torch.bool: "BOOL",
    }


def describe(path: Path, key: str) -> tuple[tuple[int, ...], torch.dtype]:
    """Returns the shape and dtype of a tensor; the header of a file is read once for all of its tensors.

    Raises:
        CheckpointError: the file can't be read, or has no such tensor.
    """
    with open_regular(path, SAFETENSORS) as file:
        status = os.fstat(file.fileno())
    header = _header(_Version(path, status.st_mtime_ns, status.st_size, key))
    if key not in header:
        raise CheckpointError(f"{path}, tensor {key}: the file has no tensor of this name")
    shape, dtype = header[key]
    torch_dtype = {name: dtype for dtype, name in dtype_names().items()}.get(dtype)
    if torch_dtype is None:
        raise CheckpointError(f"{path}, tensor {key}: values of dtype {dtype} are not read")
    return shape, torch_dtype


@dataclass(frozen=True)
class _Version:
    """Identifies a file in its last changed state, and the requested tensor, which errors name."""

    path: Path
    changed: int
    size: int
    asked_for: str = field(compare=False)


@lru_cache(maxsize=1024)
def _header(version: _Version) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns each tensor's shape and safetensors' name of its dtype, for this version of the file."""
    with open_safetensors(version.path, version.asked_for) as file:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        return {key: (tuple(part.get_shape()), part.get_dtype()) for key, part in slices.items()}


def _read_index(path: Path) -> dict[str, Path]:
    names = read_json(path, INDEX_FILE, {"weight_map": {str: str}}, unique=True)["weight_map"]
    files = {key: path.parent / name for key, name in names.items()}
    outside = sorted(name for name in set(names.values()) if Path(name).name != name)
    if outside:
        raise CheckpointError(f"{path}: names files outside of the folder: {', '.join(outside)}")
    missing = sorted({file.name for file in files.values() if not is_regular(file)})
    if missing:
        raise CheckpointError(f"{path}: files that it names are missing: {', '.join(missing)}")
    return files
