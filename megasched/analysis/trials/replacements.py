"""Makes the replacements of a schedule on a copy of the model on meta, to learn which modules they bring in.

It runs while the schedule is written, as calls on what a replacement brings in come after it. What is made here is
only looked at. ``lowering/replace.py`` makes the replacements of a run, and moves the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megasched.analysis.recording.meta_call import meta_copy
from megasched.definition.module_copy import copy_module
from megasched.language.records import Record
from megasched.language.replacements import call_factory


class Registered:
    """Holds every (parent, name) under which a module of a model is registered; a shared one has several.

    It is made once for many replacements: in deep models a walk for each of them would take long.
    """

    def __init__(self, model: nn.Module) -> None:
        self._of: dict[nn.Module, list[tuple[nn.Module, str]]] = {model: []}
        self._add_children(list(model.modules()))

    def holds(self, module: nn.Module) -> bool:
        """Returns whether a module is registered anywhere in the model."""
        return bool(self._of.get(module))

    def __getitem__(self, module: nn.Module) -> list[tuple[nn.Module, str]]:
        return self._of[module]

    def replace(self, old: nn.Module, new: nn.Module) -> list[tuple[nn.Module, str]]:
        """Registers a module wherever another of the model is, and returns these (parent, name)."""
        places = self._of[old]
        for parent, name in places:
            setattr(parent, name, new)
        added = [module for module in new.modules() if module not in self._of]
        self._of[old] = []
        self._of.setdefault(new, []).extend(places)
        self._add_children(added)
        return places

    def _add_children(self, parents: list[nn.Module]) -> None:
        for parent in parents:
            for name, child in parent._modules.items():
                if child is not None:
                    self._of.setdefault(child, []).append((parent, name))


class ReplacementTrial:
    """Holds a copy of a model in which replacements are made one after the other.

    Attributes:
        failed: path of a module whose factory raised -> what it raised. No values are there to compute with.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = meta_copy(model)
        self._places = Registered(self._model)
        self._paths: tuple[dict[str, nn.Module], dict[int, str]] | None = None
        self.failed: dict[str, str] = {}

    @property
    def modules(self) -> dict[str, nn.Module]:
        """Maps each path of each module of the copy to it."""
        return self._named()[0]

    @property
    def first_path(self) -> dict[int, str]:
        """Maps the id of each module of the copy to its first path."""
        return self._named()[1]

    def replace(self, record: Record, path: str) -> None:
        """Makes one replacement; one that can't be made leaves the module as it is."""
        try:
            old = self._model.get_submodule(path)
        except AttributeError:  # which is refused when the model is built
            return
        try:
            with torch.random.fork_rng(devices=[]), torch.device("meta"):
                new = self._apart(call_factory(record, path, old))
        except Exception as error:  # of whatever kind, of the user's code
            self.failed[path] = f"{type(error).__name__}: {error}"
            return
        self._places.replace(old, new)
        self._paths = None

    def _named(self) -> tuple[dict[str, nn.Module], dict[int, str]]:
        if self._paths is None:
            modules, first = dict(self._model.named_modules(remove_duplicate=False)), dict[int, str]()
            for path, module in modules.items():
                first.setdefault(id(module), path)
            self._paths = modules, first
        return self._paths

    def _apart(self, new: Any) -> nn.Module:
        """Returns a copy of a new module on meta, which shares with the model what it has of it, and nothing else.

        Raises:
            TypeError: a factory returned no module.
        """
        if not isinstance(new, nn.Module):
            raise TypeError(f"the factory returned {type(new).__name__}, not a module")
        memo: dict[int, Any] = {id(one): one for one in new.modules() if self._places.holds(one)}
        kept = {id(held) for one in memo.values() for held in (*one.parameters(), *one.buffers())}
        for held in (*new.parameters(), *new.buffers()):
            on_meta = held.detach().to("meta")
            if isinstance(held, nn.Parameter):
                on_meta = nn.Parameter(on_meta, requires_grad=held.requires_grad)
            memo[id(held)] = held if id(held) in kept else on_meta
        return copy_module(new, memo)
