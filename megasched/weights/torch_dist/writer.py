"""Writes a ``torch_dist`` checkpoint in one process, one chunk of a tensor at a time.

It writes the files of torch.distributed.checkpoint (torch/distributed/checkpoint/filesystem.py) and Megatron's
additions (megatron/core/dist_checkpointing/serialization.py): the common state, and ``metadata.json``, which comes
last and marks the checkpoint as complete.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megasched.weights.lazy import LazyTensor, blocks, cast
from megasched.weights.torch_dist.reader import COMMON

# A rank reads the chunks that it needs a part of, so small ones are read by few.
CHUNK = 64 << 20
# Of a file; several can be read side by side.
FILE = 4 << 30


class TorchDistWriter:
    """Writes a checkpoint tensor by tensor.

    Args:
        folder: exists and is empty.
        advance: called with the number of bytes of values written, after each chunk.
    """

    def __init__(self, folder: Path, advance: Callable[[int], Any]) -> None:
        self._folder, self._advance = folder, advance
        self._described: dict[str, Any] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}
        self._files = 0
        self._file: io.BufferedWriter | None = None

    def add(self, key: str, tensor: LazyTensor, dtype: torch.dtype) -> None:
        """Writes a tensor.

        Raises:
            OSError: it can't be written.
            CheckpointError: the tensor can't be read, or has a value that the dtype does not hold.
        """
        chunks = []
        for box in blocks(tensor.shape, dtype.itemsize, CHUNK):
            values = cast(tensor.read(box), dtype, tensor.where).contiguous()
            if values.untyped_storage().nbytes() != values.nbytes:  # torch.save writes whole storages
                values = values.clone()
            start = torch.Size(first for first, _ in box)
            chunks.append(ChunkStorageMetadata(start, torch.Size(last - first for first, last in box)))
            self._places[MetadataIndex(key, start)] = self._write(values)
            self._advance(values.nbytes)
        self._described[key] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(tensor.shape), chunks)

    def finish(self, common: Mapping[str, Any]) -> None:
        """Writes the common state and the files that complete the checkpoint.

        Raises:
            OSError: it can't be written.
        """
        self._places[MetadataIndex(COMMON)] = self._write([dict(common)])
        self._described[COMMON] = BytesStorageMetadata()
        self._close()
        metadata = Metadata(self._described, storage_data=self._places)
        (self._folder / ".metadata").write_bytes(pickle.dumps(metadata))
        text = json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
        (self._folder / "metadata.json").write_text(text)

    def _write(self, value: Any) -> _StorageInfo:
        if self._file is None or self._file.tell() >= FILE:
            self._close()
            self._file = (self._folder / f"__0_{self._files}.distcp").open("wb")
            self._files += 1
        file, start = self._file, self._file.tell()
        try:
            torch.save(value, file)  # the archive is the same as in a file of its own
        except RuntimeError as error:  # of the archive that a full disk left unfinished
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
        return _StorageInfo(Path(file.name).name, start, file.tell() - start)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
