"""Restores what a run that is not to count changes in the state that a module's code keeps between calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn

from megasched.analysis.notes.python_state import Spot, State, is_looked_into
from megasched.definition.code_state.holder import Holder, items_of
from megasched.definition.code_state.random_states import python_random_states, set_python_random_states
from megasched.definition.module_copy import filled_cells

# Packages for training. They keep state in objects that belong together, some of them outside of modules:
# restored in part it would not fit. And they know of recompute themselves.
OTHERS = frozenset(["transformer_engine", "megatron", "megasched", "apex"])


class RestorableState(State):
    """Holds the state of a module's code at one moment, and how to restore it.

    Unlike a ``State``, it compares tensors and torch's generators by identity, buffers and parameters included.

    Args:
        values: whether ``lend_tensors`` and ``restore`` take care of values of tensors and of torch's generators.
        outside: whether it holds what is in globals and classes, too. In a run other threads may change that.
    """

    def __init__(self, model: nn.Module, *, values: bool, outside: bool) -> None:
        self._values, self._outside = values, outside
        self._in_modules: frozenset[str] = frozenset()
        self._compared: list[Any] = []  # held, so that no other tensor gets the id
        self._holders: list[Holder] = []
        self._tensors: list[tuple[Spot, torch.Tensor]] = []
        self._restorable = True
        super().__init__(model)

    def changed_outside(self, later: RestorableState) -> list[str]:
        """Returns the names in globals and classes whose values differ in ``later``."""
        return [name for name in self.changed(later) if name not in self._in_modules | later._in_modules]

    def lend_tensors(self) -> None:
        """Gives the modules copies of their tensors, parameters excepted, until ``restore``."""
        copies: dict[int, torch.Tensor] = {}
        for spot, tensor in self._tensors:
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            spot.owner[spot.key] = copies[id(tensor)]

    def restore(self) -> None:
        """Restores the state."""
        for holder in self._holders:
            holder.put_back()

    def _take_module(self, path: str, module: nn.Module) -> None:
        self._restorable = package_of(module) not in OTHERS
        if self._restorable:
            self._note(vars(module))
        super()._take_module(path, module)
        self._restorable = True
        for table in (module._buffers, module._parameters):
            self._note(table)
            for name, tensor in table.items():
                self._take(f"{path}.{name}".lstrip("."), tensor, Spot(table, name), 0)

    def _take_outside(self, model: nn.Module) -> None:
        self._in_modules, self._values = frozenset(self.values), False
        if self._outside:
            super()._take_outside(model)

    def _take(self, name: str, value: Any, spot: Spot, depth: int) -> None:
        if isinstance(value, torch.Tensor | torch.Generator):
            self.values[name] = (type(value), id(value))
            self._compared.append(value)
        elif id(value) not in self._seen and self._restorable:
            self._note(value)
        if isinstance(value, torch.Tensor):
            lent = self._values and self._restorable and isinstance(spot.owner, dict | list | deque)
            if lent and not isinstance(value, nn.Parameter):
                self._tensors.append((spot, value))
        elif not isinstance(value, torch.Generator):
            super()._take(name, value, spot, depth)
        elif self._values and self._restorable:
            self._note(value)

    def _note(self, value: Any) -> None:
        self._holders += _holders_of(value)


def package_of(module: nn.Module) -> str:
    """Returns the name of the package that a module's class is of."""
    return type(module).__module__.partition(".")[0]


def _holders_of(value: Any) -> Iterator[Holder]:
    """Yields what is to be put back: a container, a generator, a closure, the attributes of an object."""
    holders: list[Any] = [value]
    if isinstance(value, FunctionType):
        holders = [*filled_cells(value).values(), vars(value)]
    elif is_looked_into(type(value)) and isinstance(attributes := getattr(value, "__dict__", None), dict):
        holders.append(attributes)
    for holder in holders:
        if (items := items_of(holder)) is not None:
            yield Holder(holder, items)


@contextmanager
def restored(model: nn.Module, *, values: bool, outside: bool) -> Iterator[RestorableState]:
    """Runs its body, a run that is not to count, and restores the state of a model's code.

    Args:
        values: whether the values of tensors are restored, too, parameters excepted: the body works on copies.
        outside: whether what is in containers of globals and classes is; what these names stand for is up to
            ``undisturbed``.
    """
    before = RestorableState(model, values=values, outside=outside)
    drawn = python_random_states()
    if values:
        before.lend_tensors()
    try:
        yield before
    finally:
        before.restore()
        set_python_random_states(drawn)
