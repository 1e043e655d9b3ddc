"""Weights from an HF model folder: names as transformers resolves them, bytes of this rank's shards only."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from megasched.errors import CheckpointError
from megasched.placement import Placement
from megasched.weights.names import canonical_names, compare_names
from megasched.weights.safetensors_files import has_weights, list_tensors, read_local

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

__all__ = ["HFFolder", "has_weights"]

# Buffers that older releases saved and that classes now compute; transformers passes over them as well
# (_adjust_missing_and_unexpected_keys in transformers/modeling_utils.py).
COMPUTED_BUFFERS = ("rotary_emb.inv_freq", "position_ids")


class HFFolder:
    """A weight source that reads an HF model folder: ``model.safetensors``, or an index and its shards.

    A file is open only while a tensor is read from it.

    Args:
        folder: as ``save_pretrained`` writes it.
        definition: the model whose names are asked for; only its names and shapes are read, now.

    Raises:
        CheckpointError: no safetensors weights, a damaged index, a missing shard, or tensors that would
            have to be merged.
    """

    def __init__(self, folder: str | Path, definition: PreTrainedModel) -> None:
        self._folder = Path(folder)
        self._files = list_tensors(folder)
        self._canonical = canonical_names(definition)
        state = definition.state_dict()
        self._buffers = {name: tuple(value.shape) for name, value in state.items() if name not in self._canonical}
        self._ignored = _ignored_patterns(definition)
        self._stored: dict[str, list[str]] = {}
        self._unknown: list[str] = []
        resolver = _Resolver(definition)
        for key in self._files:
            name, is_part = resolver.resolve(key)
            if name is None:
                self._unknown.append(key)
            elif is_part:
                raise CheckpointError(
                    f"{self._files[key]}: tensor {key} is but a part of {name}; transformers merges such "
                    "tensors when it loads them, megasched reads them merged: AutoModelForCausalLM"
                    ".from_pretrained(folder).save_pretrained(new_folder, save_original_format=False)"
                )
            else:
                self._stored.setdefault(self._canonical.get(name, name), []).append(key)

    def local(self, placement: Placement, rank: int, size: int) -> torch.Tensor:
        """See ``WeightSource.local``; the dtype is the file's.

        Raises:
            CheckpointError: no such tensor, another shape, an unreadable file, or tied names that are
                both stored with different values.
        """
        import torch

        keys = self._stored.get(placement.name)
        if not keys:
            raise CheckpointError(f"{self._folder}: no tensor for the parameter {placement.name}")
        first, *others = [read_local(self._files[key], key, placement, rank, size) for key in keys]
        for key, other in zip(keys[1:], others, strict=True):
            if not torch.equal(first, other):
                raise CheckpointError(
                    f"{self._folder}: {keys[0]} and {key} are one parameter of the definition but differ in "
                    "the files; if they should not be tied, set tie_word_embeddings=false in the config"
                )
        return first

    def buffer(self, name: str) -> torch.Tensor | None:
        """See ``WeightSource.buffer``; None where the folder has no such tensor."""
        if name not in self._stored or name not in self._buffers:
            return None
        return self.local(Placement(name, self._buffers[name]), 0, 1)

    def check(self, names: Collection[str]) -> None:
        """See ``WeightSource.check``; unexpected names are given as the files have them."""
        wanted = set(names)
        missing = wanted - set(self._stored)
        unexpected = [key for key in self._unknown if not any(p.search(key) for p in self._ignored)]
        for name, keys in self._stored.items():
            if name not in wanted and name not in self._buffers:
                unexpected += keys
        compare_names(f"the weights in {self._folder}", missing, unexpected)


class _Resolver:
    """Stored tensor name -> name in the definition, by transformers' own rules.

    These are its renamings of older layouts, and the base model prefix added or taken away where a folder
    was written by the base model and is read by the model with a head, or the other way round. See
    ``convert_and_load_state_dict_in_model`` in transformers/core_model_loading.py.
    """

    def __init__(self, definition: PreTrainedModel) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self._known = definition.state_dict()
        self._prefix = definition.base_model_prefix
        rules = get_model_conversion_mapping(definition)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]

    def resolve(self, key: str) -> tuple[str | None, bool]:
        """The name (None: the definition has no such tensor), and whether the tensor is but a part of it."""
        from transformers.core_model_loading import rename_source_key

        name, part = rename_source_key(key, self._renamings, self._converters, self._prefix, self._known)
        if name not in self._known and key in self._known:
            name, part = key, None
        return (name, part is not None) if name in self._known else (None, False)


def _ignored_patterns(definition: PreTrainedModel) -> list[re.Pattern[str]]:
    """Names of stored tensors that the HF class itself passes over when it has no place for them."""
    patterns = list(definition._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in definition.named_buffers()]
    for suffix in COMPUTED_BUFFERS:
        if any(name.endswith(suffix) for name in buffers):
            patterns.append(rf"(^|\.){re.escape(suffix)}$")
    return [re.compile(pattern) for pattern in patterns]
