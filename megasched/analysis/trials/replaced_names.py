"""Tells what has become of the names of a definition in which modules were replaced, by what they named."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

import torch
from torch import nn

from megasched.language.replacements import ReplacedNames


class NamesBefore:
    """Holds the modules, parameters and buffers of a model by all of their names, as they were at a time."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.tensors = _tensors(model)
        self.stored = _stored(model, self.tensors)

    def compare(self, model: nn.Module) -> ReplacedNames:
        """Returns what has become of the names in the model after replacements."""
        now, tensors_now = dict(model.named_modules(remove_duplicate=False)), _tensors(model)
        names_of: dict[int, list[str]] = defaultdict(list)
        for name, held in (*now.items(), *tensors_now.items()):
            names_of[id(held)].append(name)
        first: dict[int, str] = {}
        for name, tensor in self.tensors.items():
            first.setdefault(id(tensor), name)
        moved_tensors = [(n, id(t)) for n, t in tensors_now.items() if self.tensors.get(n) is not t]
        renamed = {name: first[tensor] for name, tensor in moved_tensors if tensor in first}
        moved = {
            path: names_of[id(module)][0]
            for path, module in self.modules.items()
            if now.get(path) is not module and id(module) in names_of
        }
        heirs, stored = self._heirs(now, moved, names_of), _stored(model, tensors_now)
        before, after = ({id(tensor) for tensor in held.values()} for held in (self.stored, stored))
        made = frozenset(name for name, tensor in stored.items() if id(tensor) not in before)
        lost = {first[id(tensor)]: tensor for tensor in self.stored.values() if id(tensor) not in after}
        parameters = frozenset(name for name, tensor in lost.items() if isinstance(tensor, nn.Parameter))
        saved_as = self._saved_as(stored, made)
        return ReplacedNames(renamed, moved, heirs, saved_as, parameters, frozenset(lost) - parameters, made)

    def _heirs(
        self, now: Mapping[str, nn.Module], moved: Mapping[str, str], names_of: Mapping[int, list[str]]
    ) -> dict[str, str]:
        old, heirs = {id(module) for module in self.modules.values()}, dict[str, str]()
        for path, module in self.modules.items():
            if path in now or path in moved:
                continue
            homes = [
                {home for home, _, leaf in (full.rpartition(".") for full in names_of[id(held)]) if leaf == name}
                for name, held in module.named_parameters(recurse=False)
            ]
            new = {home for home in set.intersection(*homes) if id(now[home]) not in old} if homes else set()
            if len(new) == 1:
                heirs[path] = new.pop()
        return heirs

    def _saved_as(self, stored: Mapping[str, torch.Tensor], made: Collection[str]) -> dict[str, str]:
        """Returns the name in the definition of each tensor that is stored under another; see ``ReplacedNames``.

        Args:
            stored: by its names after replacements.
            made: names of what the definition has not, which are taken.
        """
        gone = defaultdict[int, list[str]](list)
        for name, tensor in self.stored.items():
            if stored.get(name) is not tensor and name not in made:
                gone[id(tensor)].append(name)
        saved_as: dict[str, str] = {}
        for name, tensor in stored.items():
            if self.stored.get(name) is not tensor and (names := gone[id(tensor)]):
                saved_as[name] = names[0] if len(names) == 1 else names.pop(0)
        return saved_as


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the parameters and buffers by all of their names."""
    parameters = model.named_parameters(remove_duplicate=False)
    return dict((*parameters, *model.named_buffers(remove_duplicate=False)))


def _stored(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns those of a model's tensors that its state dict has: parameters and persistent buffers."""
    names = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in tensors.items() if name in names}
