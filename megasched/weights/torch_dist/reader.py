"""Reads Megatron's ``torch_dist`` checkpoints in one process, one box of a tensor at a time.

The format is that of torch.distributed.checkpoint (torch/distributed/checkpoint/filesystem.py): ``.metadata`` maps
parts of tensors to places in the ``.distcp`` files, where each part lies as ``torch.save`` wrote it. Only plain
values are unpickled (``megasched/weights/torch_dist/unpickling.py``).
"""

from __future__ import annotations

import io
import os
import re
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

from megasched.errors import CheckpointError
from megasched.reading.files import MIB, Expected, is_regular
from megasched.reading.json_file import read_json
from megasched.reading.pickled import read_pickled
from megasched.reading.tracker import TRACKER, has_tracker, last_folder
from megasched.weights.lazy import Box, Leaf, refuse_nan
from megasched.weights.torch_dist.unpickling import InertPickle, Unpickler

COMMON = "common_state/shard_0_1"
# What comes before the states of an optimizer; where experts are shared out there are two, chained.
OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
# Folder in a checkpoint: config and tokenizer of the model, as HF has them.
HF_FILES = "hf_model"

FORMAT_FILE = Expected("JSON with a sharded_backend, as Megatron writes it", CheckpointError, most=MIB)
METADATA = Expected("the metadata of a torch_dist checkpoint", CheckpointError, most=1 << 32)
VALUES = Expected("values as the checkpoint's metadata describe them", CheckpointError)
_MOST = 1 << 62  # of sizes and places, which are numbers of 64 bits


def checkpoint_folder(load: str | Path) -> Path:
    """Returns the folder of one checkpoint: the last one of a ``--save`` folder, or the folder itself.

    Raises:
        CheckpointError: there is no complete ``torch_dist`` checkpoint.
    """
    folder = Path(load)
    if has_tracker(folder):
        folder = last_folder(folder)
    if not os.path.lexists(folder / "metadata.json"):
        if any(folder.glob("mp_rank_*/model_optim_rng.pt")):
            raise CheckpointError(f"{folder}: written with --ckpt-format torch; only torch_dist is read")
        there = sorted(path.name for path in folder.glob("*"))[:5] if folder.is_dir() else []
        found = f"it has {', '.join(there)}" if there else "there is nothing"
        raise CheckpointError(
            f"{folder}: no complete checkpoint: metadata.json, which Megatron writes last, is missing ({found}); "
            f"name a --save folder (with {TRACKER}) or one of its iter_* folders"
        )
    backend = read_json(folder / "metadata.json", FORMAT_FILE, {"sharded_backend": str})["sharded_backend"]
    if backend != "torch_dist":
        raise CheckpointError(f"{folder}: written with --ckpt-format {backend}; only torch_dist is read")
    return folder


@dataclass(frozen=True)
class Chunk:
    """Describes a part of a tensor and its place in the files.

    Attributes:
        start: position of the part in the tensor, along each dimension.
        size: size of the part, along each dimension.
        path, offset, length: place of the bytes that ``torch.save`` wrote.
    """

    start: tuple[int, ...]
    size: tuple[int, ...]
    path: Path
    offset: int
    length: int


@dataclass(frozen=True)
class CheckpointTensor:
    """Represents one tensor of a checkpoint, composed of chunks; a ``LazyTensor``.

    Attributes:
        key: name in the checkpoint; for the model's tensors the HF name.
    """

    folder: Path
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    @property
    def where(self) -> str:
        return f"{self.folder}: tensor {self.key}"

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def read(self, box: Box) -> torch.Tensor:
        """Reads a box from the chunks; see ``LazyTensor.read``.

        Raises:
            CheckpointError: a file is missing, cut short or damaged, or no file has a part of the tensor.
        """
        wanted = prod(stop - start for start, stop in box)
        result, filled = None, 0
        for chunk in self.chunks:
            common = tuple(
                (max(start, first), min(stop, first + length))
                for (start, stop), first, length in zip(box, chunk.start, chunk.size, strict=True)
            )
            if any(start >= stop for start, stop in common):
                continue
            inside = tuple((a - first, b - first) for (a, b), first in zip(common, chunk.start, strict=True))
            values = self._read(chunk, inside)
            refuse_nan(values, f"{chunk.path}: tensor {self.key}")
            filled += values.numel()
            if common == box and result is None:
                result = values  # in one chunk: not copied
                continue
            if result is None:
                result = torch.empty([stop - start for start, stop in box], dtype=self.dtype)
            target = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(common, box, strict=True))
            result[target] = values
        if filled != wanted:
            raise CheckpointError(f"{self.where}: {wanted - filled} of {wanted} values are nowhere")
        return torch.empty([stop - start for start, stop in box], dtype=self.dtype) if result is None else result

    def leaves(self) -> Iterator[Leaf]:
        yield self

    def check(self) -> None:
        """Checks the description of the values of each chunk, without reading the values.

        Raises:
            CheckpointError: a file is missing, cut short or damaged.
        """
        for chunk in self.chunks:
            self._read(chunk, tuple((0, 0) for _ in chunk.size))

    def _read(self, chunk: Chunk, box: Box) -> torch.Tensor:
        """Reads a box of a chunk."""

        def load(file: Any) -> torch.Tensor:
            saved = torch.load(_Slice(file, chunk), map_location="meta", weights_only=True)
            self._check(chunk, saved)
            return _values(file, chunk, saved, box)

        return read_pickled(chunk.path, VALUES, load, f"tensor {self.key}")

    def _check(self, chunk: Chunk, saved: Any) -> None:
        if not isinstance(saved, torch.Tensor) or tuple(saved.shape) != chunk.size or saved.dtype != self.dtype:
            found = f"{list(saved.shape)} in {saved.dtype}" if isinstance(saved, torch.Tensor) else type(saved)
            raise ValueError(f"the metadata has {list(chunk.size)} in {self.dtype}, the file {found}")
        if not saved.is_contiguous():
            raise ValueError("its values do not lie one after the other")


class TorchDist:
    """Represents a checkpoint.

    Args:
        folder: of one iteration; see ``checkpoint_folder``.

    Attributes:
        tensors: by key, in the order of the metadata.
        objects: keys of objects that are no tensors (RNG states, the common state).

    Raises:
        CheckpointError: the metadata is missing, damaged, or names objects that are no part of a checkpoint.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.tensors: dict[str, CheckpointTensor] = {}
        self.objects: list[str] = []
        self._places: dict[tuple[str, tuple[int, ...] | None], Any] = {}
        self._ends: dict[Path, int] = {}
        read_pickled(self.folder / ".metadata", METADATA, lambda file: self._take(Unpickler(file).load()))

    def _take(self, metadata: Any) -> None:
        """Takes tensors, objects and places from ``.metadata``; if damaged, it lacks parts or has wrong types."""
        for index, info in metadata.storage_data.items():
            self._places[index.fqn, _start(index)] = info
            path = self._inside(info.relative_path)
            _refuse_no_sizes(f"where {index.fqn:.80} lies", (info.offset, info.length))
            self._ends[path] = max(self._ends.get(path, 0), info.offset + info.length)
        for key, value in metadata.state_dict_metadata.items():
            if hasattr(value, "chunks"):
                self.tensors[key] = self._tensor(key, value)
            else:
                self.objects.append(key)

    @property
    def model(self) -> dict[str, CheckpointTensor]:
        """Returns the tensors that are no optimizer states, by HF name."""
        return {key: tensor for key, tensor in self.tensors.items() if not OPTIMIZER.match(key)}

    def problems(self) -> list[str]:
        """Returns one line for each file named by the metadata that is missing or cut short."""
        found = []
        for path, end in sorted(self._ends.items()):
            if not is_regular(path):
                found.append(f"{path} is missing")
            elif path.stat().st_size < end:
                found.append(f"{path} has {path.stat().st_size} bytes, expected at least {end}")
        return found

    def check_files(self) -> None:
        """Checks that all files named by the metadata are complete.

        Raises:
            CheckpointError: lists all ``problems``.
        """
        problems = self.problems()
        if problems:
            raise CheckpointError("\n    ".join([f"{self.folder}: the checkpoint is damaged:", *problems]))

    def unreadable(self) -> list[str]:
        """Returns one line for each tensor with an unreadable part; everything but the values is checked."""
        found = []
        for tensor in self.tensors.values():
            try:
                tensor.check()
            except CheckpointError as error:
                found.append(str(error))
        return found

    @cached_property
    def common(self) -> dict[str, Any]:
        """Returns the state that all ranks share, e.g. Megatron's ``args`` and ``iteration``; empty without any.

        Raises:
            CheckpointError: it can't be read.
        """
        info = self._places.get((COMMON, None))
        if info is None:
            return {}
        chunk = Chunk((), (), self._inside(info.relative_path), info.offset, info.length)

        def load(file: Any) -> dict[str, Any]:
            # weights_only goes with torch's own unpickler; this one lets less through.
            states = torch.load(_Slice(file, chunk), "cpu", pickle_module=InertPickle, weights_only=False)
            return _checked_common(states[0])

        return read_pickled(chunk.path, VALUES, load, f"object {COMMON}")

    def _tensor(self, key: str, described: Any) -> CheckpointTensor:
        chunks = []
        for chunk in described.chunks:
            start = tuple(chunk.offsets)
            _refuse_no_sizes(f"a part of {key:.80}", (*start, *chunk.sizes))
            info = self._places.get((key, start))
            if info is None:
                raise CheckpointError(f"no file for {key} at {list(start)}")
            path = self._inside(info.relative_path)
            chunks.append(Chunk(start, tuple(chunk.sizes), path, info.offset, info.length))
        shape, dtype = tuple(described.size), described.properties.dtype
        _refuse_no_sizes(f"the shape of {key:.80}", (*shape, prod(shape)))
        if not isinstance(dtype, torch.dtype) or any(len(chunk.size) != len(shape) for chunk in chunks):
            raise CheckpointError(f"{key:.80}: its parts do not describe a tensor of shape {list(shape)}")
        return CheckpointTensor(self.folder, key, shape, dtype, tuple(chunks))

    def _inside(self, relative: str) -> Path:
        if Path(relative).name != relative:
            raise CheckpointError(f"names a file outside of the checkpoint: {relative!r}")
        return self.folder / relative


class _Slice(io.RawIOBase):
    """Presents the bytes of a chunk as a file."""

    def __init__(self, file: Any, chunk: Chunk) -> None:
        self._file, self._offset, self._length = file, chunk.offset, chunk.length
        self._at = 0
        held = os.fstat(file.fileno()).st_size
        if held < chunk.offset + chunk.length:
            raise ValueError(f"the file ends at byte {held}, expected at least {chunk.offset + chunk.length}")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer).cast("B")
        count = max(0, min(len(wanted), self._length - self._at))
        self._file.seek(self._offset + self._at)
        read = self._file.readinto(wanted[:count])
        self._at += read
        return read


def _values(file: Any, chunk: Chunk, saved: torch.Tensor, box: Box) -> torch.Tensor:
    """Reads a box of a saved tensor.

    It reads the file from the box's first row to its last. A row spans all dimensions behind the first one in
    which the box has more than one index.
    """
    fixed = 0
    while fixed < len(box) - 1 and box[fixed][1] - box[fixed][0] == 1:
        fixed += 1
    start, stop = box[fixed] if box else (0, 1)
    row = tuple(saved.shape[fixed + 1 :])
    before = sum(first * stride for (first, _), stride in zip(box[:fixed], saved.stride(), strict=False))
    size = saved.dtype.itemsize
    # Where torch.load, asked for no values, says that they lie in the file.
    values_at = saved.untyped_storage()._checkpoint_offset + saved.storage_offset() * size
    stretch = torch.empty((stop - start, *row), dtype=saved.dtype)
    buffer = stretch.view(-1).view(torch.uint8).numpy()
    file.seek(chunk.offset + values_at + (before + start * prod(row)) * size)
    if file.readinto(memoryview(buffer)) != buffer.nbytes:
        raise ValueError("the file ends within its values")
    if not box:
        return stretch[0]
    cut = stretch[(slice(None), *(slice(a, b) for a, b in box[fixed + 1 :]))]
    return cut[(None,) * fixed]


def _refuse_no_sizes(what: str, numbers: tuple[Any, ...]) -> None:
    if not all(type(number) is int and 0 <= number < _MOST for number in numbers):
        raise CheckpointError(f"{what} is {numbers!s:.60}; whole numbers of at least 0 are due")


def _checked_common(common: Any) -> dict[str, Any]:
    """Returns the common state after checking the types of the values that are used.

    Raises:
        TypeError: it is no dictionary, or one of these values has another type.
    """
    if not isinstance(common, dict) or not all(isinstance(key, str) for key in common):
        raise TypeError(f"{type(common).__name__} is there, a dictionary is due")
    if not isinstance(common.get("args", Namespace()), Namespace):
        raise TypeError(f"args is {common['args']!r:.60}, a Namespace is due")
    if type(common.get("iteration", 0)) is not int or not 0 <= common.get("iteration", 0) < _MOST:
        raise TypeError(f"iteration is {common['iteration']!r:.60}, a whole number is due")
    return common


def _start(index: Any) -> tuple[int, ...] | None:
    return None if index.offset is None else tuple(index.offset)
