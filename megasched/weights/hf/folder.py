"""Reads weights from an HF model folder: names as transformers resolves them, bytes of this rank's shards only."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megasched.errors import CheckpointError
from megasched.plan.placement import Placement
from megasched.weights.hf.conversions import Conversions
from megasched.weights.hf.quantized import dequantized
from megasched.weights.hf.safetensors_files import list_tensors
from megasched.weights.lazy import Box, LazyTensor, Stored, Tied, blocks, whole, zeros
from megasched.weights.source import canonical_names, compare_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Buffers that older releases saved and that classes now compute; transformers passes over them as well
# (_adjust_missing_and_unexpected_keys in transformers/modeling_utils.py).
COMPUTED_BUFFERS = ("rotary_emb.inv_freq", "position_ids")


class HFFolder:
    """Provides weights from an HF model folder: ``model.safetensors``, or an index and its shards.

    A file is open only while a tensor is read from it.

    Args:
        folder: in the form that ``save_pretrained`` writes.
        definition: the model whose names are requested; only its names and shapes are read, and only now.

    Raises:
        CheckpointError: no safetensors weights, a damaged index, or a missing shard.
    """

    def __init__(self, folder: str | Path, definition: PreTrainedModel) -> None:
        self._folder = Path(folder)
        files = {key: Stored(path, key) for key, path in list_tensors(folder).items()}
        stored = dequantized(files, definition.config)
        self._canonical = canonical_names(definition)
        state = definition.state_dict()
        self._buffers = {name: tuple(value.shape) for name, value in state.items() if name not in self._canonical}
        self._ignored = _ignored_patterns(definition)
        self._conversions = Conversions(definition)
        renamed, self._merges, self._unknown = self._conversions.resolve(stored)
        self._tensors: dict[str, list[LazyTensor]] = {}
        for key, name in renamed.items():
            self._add(name, stored[key])
        for merge in self._merges.values():
            for name, tensor in merge.tensors(stored, definition).items():
                self._add(name, tensor)

    def _add(self, name: str, tensor: LazyTensor) -> None:
        self._tensors.setdefault(self._canonical.get(name, name), []).append(tensor)

    @property
    def buffers(self) -> list[str]:
        """Returns the persistent buffers that the folder has."""
        return [name for name in self._buffers if name in self._tensors]

    @property
    def passed_over(self) -> list[str]:
        """Returns the stored names that the class itself does not load, except for buffers that it computes.

        They are layers for later tokens, or parts of another model.
        """
        return [k for k in self._unknown if self._ignores(k) and not k.endswith(COMPUTED_BUFFERS)]

    def _ignores(self, key: str) -> bool:
        return any(pattern.search(key) for pattern in self._ignored)

    def tensor(self, name: str) -> LazyTensor:
        """Returns the tensor of a parameter (a tied one by its first name) or of a persistent buffer.

        Raises:
            CheckpointError: the folder has none.
        """
        tensors = self._tensors.get(name)
        if not tensors:
            raise CheckpointError(f"{self._folder}: no tensor for the parameter {name}")
        return tensors[0] if len(tensors) == 1 else Tied(tensors)

    def local(self, placement: Placement, rank: int, size: int) -> torch.Tensor:
        """Returns this rank's part of a parameter in the file's dtype; see ``WeightSource.local``.

        Raises:
            CheckpointError: no such tensor, another shape, an unreadable file, a NaN, or tied
                names that are both stored with different values.
        """
        return read_local(self.tensor(placement.name), placement, rank, size)

    def buffer(self, name: str) -> torch.Tensor | None:
        """Returns a persistent buffer, or None if the folder has no such tensor; see ``WeightSource.buffer``."""
        if name not in self._tensors or name not in self._buffers:
            return None
        return self.local(Placement(name, self._buffers[name]), 0, 1)

    def check(self, names: Collection[str]) -> None:
        """Checks names like ``WeightSource.check``; unexpected names are those in the files."""
        wanted = set(names)
        missing = wanted - set(self._tensors)
        unexpected = [key for key in self._unknown if not self._ignores(key)]
        for name, tensors in self._tensors.items():
            if name not in wanted and name not in self._buffers:
                unexpected += [leaf.key for tensor in tensors for leaf in tensor.leaves()]
        for merge in self._merges.values():
            found = {key for keys in merge.stored.values() for key in keys}
            expected = self._conversions.stored_names(merge)
            if len(found) != len(expected):
                missing |= expected - found
                unexpected += sorted(found - expected)
        compare_names(f"the weights in {self._folder}", missing, unexpected)


def read_local(tensor: LazyTensor, placement: Placement, rank: int, size: int) -> torch.Tensor:
    """Returns rank ``rank``'s part of ``size`` of a tensor; reads that part alone.

    Returns:
        CPU tensor in the stored dtype, contiguous, with memory of its own.

    Raises:
        CheckpointError: the file can't be read, has the tensor in another shape, or a value is NaN.
    """
    if tensor.shape != placement.shape:
        raise CheckpointError(
            f"{tensor.where} has shape {list(tensor.shape)}, the definition has {list(placement.shape)}"
        )
    local = zeros(placement.local_shape(size), tensor.dtype)  # what is not filled is padding
    upright = local.t() if placement.transposed else local
    if placement.axis is None:
        _fill(upright, tensor, whole(placement.shape))
        return local
    before, after = whole(placement.shape[: placement.axis]), whole(placement.shape[placement.axis + 1 :])
    at = 0
    for start, stop in placement.ranges(rank, size):
        _fill(upright.narrow(placement.axis, at, stop - start), tensor, (*before, (start, stop), *after))
        at += stop - start
    return local


def _fill(target: torch.Tensor, tensor: LazyTensor, box: Box) -> None:
    """Copies a box of a tensor block by block, so that no second copy of a large one is held."""
    for block in blocks(target.shape, target.itemsize):
        read = tuple((first + start, first + stop) for (first, _), (start, stop) in zip(box, block, strict=True))
        target[tuple(slice(start, stop) for start, stop in block)] = tensor.read(read)


def _ignored_patterns(definition: PreTrainedModel) -> list[re.Pattern[str]]:
    """Returns patterns of stored names that the HF class itself ignores if it has no place for them."""
    patterns = list(definition._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in definition.named_buffers()]
    for suffix in COMPUTED_BUFFERS:
        if any(name.endswith(suffix) for name in buffers):
            patterns.append(rf"(^|\.){re.escape(suffix)}$")
    return [re.compile(pattern) for pattern in patterns]
