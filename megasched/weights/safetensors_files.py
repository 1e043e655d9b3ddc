"""The safetensors files of a folder: which tensor lies in which, and reading a part of one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasched.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from megasched.placement import Placement

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Weights in formats that are not read. Trainers leave other .bin and .pt files around: those are no weights.
OTHER_FORMATS = ("pytorch_model*", "consolidated*", "tf_model*.h5", "flax_model*.msgpack", "*.gguf")


def has_weights(folder: str | Path) -> bool:
    """Whether the folder holds weights in any format, so also such as ``list_tensors`` refuses to read.

    False for a folder with a config alone, a ``config.json`` file, or a path that doesn't exist.
    """
    return any(any(Path(folder).glob(pattern)) for pattern in ("*.safetensors", INDEX, *OTHER_FORMATS))


def list_tensors(folder: str | Path) -> dict[str, Path]:
    """Tensor name -> safetensors file that holds it, from ``model.safetensors`` or the index of the shards.

    Raises:
        CheckpointError: there are no safetensors weights, the index is damaged, or a shard is missing.
    """
    folder = Path(folder)
    if (folder / SINGLE).is_file():
        with opened(folder / SINGLE) as file:
            return dict.fromkeys(file.keys(), folder / SINGLE)
    if (folder / INDEX).is_file():
        return _read_index(folder / INDEX)
    others = sorted(path.name for pattern in ("*.safetensors", *OTHER_FORMATS) for path in folder.glob(pattern))
    found = f"it has {', '.join(others)}" if others else "it has no weights"
    raise CheckpointError(
        f"{folder}: no {SINGLE} and no {INDEX}; {found}. Only safetensors are read (pickled weights can run "
        "code); to convert: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
    )


def read_local(path: Path, key: str, placement: Placement, rank: int, size: int) -> torch.Tensor:
    """What TP rank ``rank`` of ``size`` holds of the tensor ``key``; reads the bytes of that part alone.

    Returns:
        CPU tensor in the file's dtype, contiguous, with memory of its own.

    Raises:
        CheckpointError: the file can't be read, lacks the tensor, or has it in another shape.
    """
    import torch

    with opened(path, key) as file:
        part = file.get_slice(key)
        shape = tuple(part.get_shape())
        if shape != placement.shape:
            raise CheckpointError(
                f"{path}: tensor {key} has shape {list(shape)}, the definition has {list(placement.shape)}"
            )
        if placement.axis is None:
            pieces = [file.get_tensor(key)]
        else:
            before = (slice(None),) * placement.axis
            pieces = [part[(*before, slice(start, stop))] for start, stop in placement.ranges(rank, size)]
        # The pieces are views of the mapped file: a copy lets go of it.
        return placement.assemble(pieces, size).clone(memory_format=torch.contiguous_format)


@contextmanager
def opened(path: Path, key: str = "") -> Iterator[Any]:
    """The safetensors file, open; what goes wrong inside is a CheckpointError that names file and tensor."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        about = f", tensor {key}" if key else ""
        raise CheckpointError(f"{path}{about}: can't be read as safetensors: {error}") from error


def _read_index(path: Path) -> dict[str, Path]:
    try:
        names = json.loads(path.read_text())["weight_map"]
        files = {key: path.parent / name for key, name in names.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: expected JSON with a weight_map from tensor to file: {error!r}") from error
    missing = sorted({file.name for file in files.values() if not file.is_file()})
    if missing:
        raise CheckpointError(f"{path}: files that it names are missing: {', '.join(missing)}")
    return files
