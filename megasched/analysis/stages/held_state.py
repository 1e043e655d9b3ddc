"""Finds out where a model's parameters and buffers live among its layers, and which ones a forward writes to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from megasched.analysis.recording.operators import storage_of
from megasched.analysis.recording.tape import Tape

# Done twice, they give what they give once: what was bounded before stays as it is.
_SAME_AGAIN = frozenset(["clamp_", "clamp_min_", "clamp_max_"])


class HeldState:
    """Holds the parameters and buffers of a model, with the modules and layers that have them.

    Args:
        tape: tape of a forward of the model.
        layers: path of a layer -> its index.

    Attributes:
        owners: name of a parameter -> the modules that have it.
    """

    def __init__(self, tape: Tape, layers: Mapping[str, int]) -> None:
        model = tape.model
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.owners: dict[str, set[str]] = defaultdict(set)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.owners[names[id(parameter)]].add(name.rpartition(".")[0])
        self._homes = {name: _layers_of(owners, layers) for name, owners in self.owners.items()}
        self._parameters = {tape.held[name].storage: name for name, _ in model.named_parameters()}
        self._names = {held.storage: names.get(id(held.tensor), name) for name, held in tape.held.items()}
        self._rewritten = {names.get(id(tape.held[name].tensor), name) for name in tape.rewritten}

    def read(self, tensors: Collection[torch.Tensor]) -> Iterator[tuple[str, set[int], set[str]]]:
        """Yields each parameter among tensors, also one read as its ``.data``, with its layers and its modules.

        There are no layers where a module outside of them has the parameter, too.
        """
        for name in {self.parameter(tensor) for tensor in tensors} - {None}:
            yield name, self._homes[name], self.owners[name]

    def parameter(self, tensor: torch.Tensor) -> str | None:
        """Returns the name of the parameter that shares its storage with the tensor; None without one."""
        return self._parameters.get(storage_of(tensor))

    def note_changed(self, func: Any, changed: Collection[torch.Tensor]) -> None:
        """Notes the parameters and buffers that an operation writes to."""
        if changed and func.__name__.partition(".")[0] not in _SAME_AGAIN:
            self._rewritten |= {self._names[storage_of(t)] for t in changed if storage_of(t) in self._names}

    def rewritten(self) -> str:
        """Returns the first name of a tensor that a forward changes, by value or for autograd; empty if none."""
        return min(self._rewritten, default="")


def _layers_of(owners: Collection[str], layers: Mapping[str, int]) -> set[int]:
    """Returns the layers that modules lie in; none where one of the modules lies in no layer."""
    holding = [[path for path in _with_those_around(owner) if path in layers] for owner in owners]
    return {layers[path] for paths in holding for path in paths} if all(holding) else set()


def _with_those_around(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]
