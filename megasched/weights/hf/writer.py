"""Writes the weights of an HF folder: safetensors in shards with an index, one block of a tensor at a time.

The library's own writer needs whole tensors; the embedding of a large model alone is gigabytes. The format is
simple and fixed (github.com/huggingface/safetensors, README): the length of a JSON header, the header, the values.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from megasched.weights.hf.safetensors_files import INDEX, SINGLE, dtype_names
from megasched.weights.lazy import Box, LazyTensor, blocks, cast
from megasched.weights.progress import ahead


@dataclass(frozen=True)
class Output:
    """Describes a tensor to be written.

    Attributes:
        tensor: source of the values.
        dtype: written dtype.
    """

    name: str
    tensor: LazyTensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.tensor.shape) * self.dtype.itemsize


def write_weights(
    folder: Path, outputs: Sequence[Output], max_shard_size: int, advance: Callable[[int], Any]
) -> None:
    """Writes ``model.safetensors``, or shards of it and their index.

    Args:
        folder: exists, without weights.
        max_shard_size: bytes of values in one file; a larger tensor gets a file of its own.
        advance: called with the number of bytes written, after each block.

    Raises:
        OSError: it can't be written.
        CheckpointError: a tensor can't be read, or has a value that its dtype does not hold.
    """
    shards = _shards(outputs, max_shard_size)
    if len(shards) == 1:
        _write_file(folder / SINGLE, shards[0], advance)
        return
    files = {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, 1)
    }
    for name, shard in files.items():
        _write_file(folder / name, shard, advance)
    index: Mapping[str, Any] = {
        "metadata": {"total_size": sum(output.nbytes for output in outputs)},
        "weight_map": {output.name: name for name, shard in files.items() for output in shard},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(outputs: Sequence[Output], limit: int) -> list[list[Output]]:
    shards: list[list[Output]] = [[]]
    size = 0
    for output in outputs:
        if shards[-1] and size + output.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(output)
        size += output.nbytes
    return shards


def _write_file(path: Path, outputs: Sequence[Output], advance: Callable[[int], Any]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    names, end = dtype_names(), 0
    for output in outputs:
        start, end = end, end + output.nbytes
        shape = list(output.tensor.shape)
        header[output.name] = {"dtype": names[output.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for values in ahead(_blocks(outputs)):
            file.write(memoryview(values.view(-1).view(torch.uint8).numpy()))
            advance(values.nbytes)


def _blocks(outputs: Sequence[Output]) -> Iterator[Callable[[], torch.Tensor]]:
    """Yields functions that each read one block of the output."""
    for output in outputs:
        for box in blocks(output.tensor.shape, max(output.dtype.itemsize, output.tensor.dtype.itemsize)):
            yield partial(_read, output, box)


def _read(output: Output, box: Box) -> torch.Tensor:
    return cast(output.tensor.read(box), output.dtype, output.tensor.where).contiguous()
