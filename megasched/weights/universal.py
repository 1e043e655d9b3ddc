"""Reads DeepSpeed's universal checkpoints: a folder for each parameter, under its HF name, with the whole tensor.

``ds_to_universal`` writes them (deepspeed/checkpoint/ds_to_universal.py). Nothing in their pickles is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from megasched.errors import CheckpointError
from megasched.reading.files import Expected
from megasched.reading.pickled import read_pickled
from megasched.weights.lazy import Box, Leaf, refuse_nan

_VALUES = "fp32.pt"
_FILE = Expected(
    "the values of a parameter, which DeepSpeed's ds_to_universal writes", CheckpointError, most=1 << 50
)


@dataclass(frozen=True)
class UniversalTensor:
    """Represents the float32 values of one parameter, which are mapped from their file."""

    path: Path
    key: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._values.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self._values.dtype

    @property
    def where(self) -> str:
        return f"{self.path}: parameter {self.key}"

    def read(self, box: Box) -> torch.Tensor:
        values = self._values[tuple(slice(start, stop) for start, stop in box)]
        refuse_nan(values, self.where)
        return values

    def leaves(self) -> Iterator[Leaf]:
        yield self

    @cached_property
    def _values(self) -> torch.Tensor:
        def load(file: Any) -> torch.Tensor:
            held = torch.load(str(self.path), map_location="cpu", mmap=True, weights_only=True)
            values = held["param"]
            if not isinstance(values, torch.Tensor):
                raise CheckpointError("its entry 'param' is no tensor")
            return values

        found: torch.Tensor = read_pickled(self.path, _FILE, load)
        return found


@dataclass(frozen=True)
class UniversalCheckpoint:
    """Holds the parameters of a universal checkpoint, as ``TorchDist`` does those of Megatron's.

    Attributes:
        folder: that ``ds_to_universal`` wrote.
        common: what a Megatron checkpoint says of its run; nothing here.
    """

    folder: Path

    @property
    def common(self) -> dict[str, Any]:
        return {}

    @cached_property
    def model(self) -> dict[str, UniversalTensor]:
        """Maps the name of each parameter to its tensor."""
        files = sorted((self.folder / "zero").glob(f"*/{_VALUES}"))
        return {file.parent.name: UniversalTensor(file, file.parent.name) for file in files}

    def check_files(self) -> None:
        """Raises CheckpointError where a parameter has no file of values."""
        folders = [path for path in (self.folder / "zero").iterdir() if path.is_dir()]
        empty = [path.name for path in folders if not (path / _VALUES).is_file()]
        if empty or not self.model:
            lacking = f"{len(empty)} parameters lack it, e.g. {empty[0]}" if empty else "there are no parameters"
            raise CheckpointError(f"{self.folder}: no complete universal checkpoint: {_VALUES}: {lacking}")


def is_universal(folder: Path) -> bool:
    """Returns whether a folder has the form of a universal checkpoint."""
    return (folder / "zero").is_dir() and not (folder / "metadata.json").exists()
