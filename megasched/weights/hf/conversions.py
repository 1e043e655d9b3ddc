"""Applies transformers' own rules between the tensors of a folder and those of a definition, in both directions.

Files often keep their authors' layout: a tensor per expert where the definition has one for all of them, other
names. transformers converts on load, and back on save (transformers/core_model_loading.py,
conversion_mapping.py). This module runs its code on tensors without values, and records the operations
(``megasched/weights/traced_functions.py``), to run them box by box: a rank need not hold parts that it does not
use.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from megasched.weights.lazy import LazyTensor
from megasched.weights.traced_functions import Deferred, noted, noted_once

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Merge:
    """Represents the stored tensors from which one rule makes tensors of the definition.

    Attributes:
        target: name of the first definition tensor.
        rule: transformers' ``WeightConverter``.
        stored: pattern of the rule -> names of the tensors that matched it, in transformers' order.
    """

    target: str
    rule: Any
    stored: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    @property
    def targets(self) -> dict[str, str]:
        """Maps each name in the rule to the name in the definition."""
        first, *_ = patterns = self.rule.target_patterns
        return {pattern: self.target.replace(first, pattern) for pattern in patterns}

    def tensors(self, lazy: Mapping[str, LazyTensor], definition: PreTrainedModel) -> dict[str, LazyTensor]:
        """Returns the tensors by their definition names; the conversion is traced when one is first used."""
        sources = {key: lazy[key] for keys in self.stored.values() for key in keys}
        found = noted_once(partial(self._convert, definition), sources)
        return {name: Deferred(tuple(sources.values()), found, name) for name in self.targets.values()}

    def _convert(self, definition: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the tensors that transformers makes of the stored ones."""
        converter = copy.deepcopy(self.rule)
        for pattern, keys in self.stored.items():
            for key in keys:
                converter.add_tensor(self.target, key, pattern, tensors[key])
        found = converter.convert(self.target, model=definition, config=definition.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


class Conversions:
    """Holds the conversion rules of one definition.

    Args:
        definition: its names, shapes and config are read.
    """

    def __init__(self, definition: PreTrainedModel) -> None:
        from transformers import WeightConverter
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        self._definition = definition
        self._known = definition.state_dict()
        rules = get_model_conversion_mapping(definition)
        self._renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        # What save_pretrained reverts for a model that was not loaded (revert_weight_conversion): not the
        # renamings of names that are no longer written, nor a prefix that files may or may not have.
        reverted = get_model_conversion_mapping(definition, add_legacy=False)
        self._reverted = [rule for rule in reverted if not isinstance(rule, PrefixChange)]
        self._backwards = [
            rule.reverse_transform() for rule in self._reverted[::-1] if isinstance(rule, WeightConverter)
        ]

    def resolve(self, keys: Iterable[str]) -> tuple[dict[str, str], dict[str, Merge], list[str]]:
        """Finds the definition tensors that stored names stand for.

        Returns:
            Stored name -> definition name, if only the name changes; first definition name -> merge; stored
            names that the definition has no place for.
        """
        from transformers.core_model_loading import dot_natural_key

        renamed: dict[str, str] = {}
        merges: dict[str, Merge] = {}
        unknown = []
        for key in sorted(keys, key=dot_natural_key):  # the order in which transformers puts experts together
            name, pattern = self._rename(key)
            if name not in self._known:
                unknown.append(key)
            elif pattern is None:
                renamed[key] = name
            else:
                rule = next(rule for rule in self._converters if pattern in rule.source_patterns)
                merges.setdefault(name, Merge(name, rule)).stored[pattern].append(key)
        return renamed, merges, unknown

    def _rename(self, key: str) -> tuple[str, str | None]:
        """Returns the definition name, and the pattern of the rule that takes the tensor as an input, or None."""
        from transformers.core_model_loading import rename_source_key

        prefix = self._definition.base_model_prefix
        name, pattern = rename_source_key(key, self._renamings, self._converters, prefix, self._known)
        if name not in self._known and key in self._known:
            return rename_source_key(key, [], [], prefix, self._known)
        return name, pattern

    def groups(self, names: Iterable[str]) -> list[list[str]]:
        """Returns definition names in groups that ``original`` converts together, in the order of first names."""
        from transformers.core_model_loading import rename_source_key

        found: dict[str, list[str]] = {}
        for name in names:
            renamed, pattern = rename_source_key(name, [], self._backwards)
            # Names that no rule is about stand for themselves.
            found.setdefault(f"{pattern} {renamed}" if pattern else name, []).append(name)
        return list(found.values())

    def original(self, tensors: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
        """Returns a group of definition tensors in the form that ``save_pretrained`` writes, by stored name."""
        return noted(self._revert, tensors) if self._reverted else tensors

    def stored_names(self, merge: Merge) -> set[str]:
        """Returns the names under which ``save_pretrained`` writes the tensors of the merge."""
        targets = merge.targets.values()
        return set(self._revert({name: torch.empty_like(self._known[name], device="meta") for name in targets}))

    def _revert(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        # Where transformers keeps the rules that a model was loaded by; it reads them from there.
        self._definition._weight_conversions = self._reverted
        try:
            return revert_weight_conversion(self._definition, tensors)
        finally:
            del self._definition._weight_conversions
