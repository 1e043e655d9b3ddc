"""Restores the state that a module's code keeps from call to call, for a call that is repeated.

A recomputed forward runs twice, but a training step should see it once: moving averages in buffers, counters in
attributes and in globals, what it appends to lists, numbers drawn from generators. The second call finds the state
that the first one found, and leaves it unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from megasched.analysis.notes.restorable_state import OTHERS, package_of
from megasched.definition.code_state.code_state import CodeState
from megasched.definition.code_state.random_states import python_random_states, set_python_random_states
from megasched.errors import Problem, ScheduleError

# Of the others' modules its routers know nothing of recompute: they count in buffers wherever gradients are on,
# which they are in both forwards.
_MEGATRON = "megatron"
# What torch has on every module, of which only the buffers are state.
_OF_TORCH = frozenset(vars(nn.Module()))


class _Buffer(NamedTuple):
    module: nn.Module
    name: str
    path: str


class KeptState:
    """Tracks the state of one module and its submodules; the first call shows which tensors are written in place.

    Args:
        module: in its state before the first call.
        path: path of the module, for messages.
    """

    def __init__(self, module: nn.Module, path: str) -> None:
        self._module, self._path = module, path
        self._modules: list[nn.Module] = []
        self._written: set[_Buffer] | None = None

    def before(self) -> StateBefore:
        """Returns a snapshot of the state, to be taken before a call."""
        if self._written is None:
            self._modules = [module for _, module in self._own_modules()]
        return StateBefore(self, self._modules)

    def refuse_writes(self) -> None:
        """Raises ScheduleError: it writes to a tensor that can't be put back."""
        what = "its forward writes to a tensor in a container or a global; recompute would write to it twice"
        raise ScheduleError(Problem(what, self._path, remedy="run it without recompute of this module"))

    def tensors(self) -> Iterator[tuple[_Buffer, torch.Tensor]]:
        """Yields buffers, and tensors in attributes; of Megatron's modules buffers alone."""
        for path, module in self._module.named_modules():
            package = package_of(module)
            if package in OTHERS and package != _MEGATRON:
                continue
            for held in (module._buffers,) if package == _MEGATRON else (vars(module), module._buffers):
                for name, value in held.items():
                    if isinstance(value, torch.Tensor):
                        yield _Buffer(module, name, f"{path}.{name}".lstrip(".")), value

    def _own_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for path, module in self._module.named_modules():
            if package_of(module) not in OTHERS:
                yield path, module

    def to_be_copied(self) -> list[tuple[_Buffer, torch.Tensor]]:
        """Returns the tensors that the code may write in place; all of them before the first call."""
        found = self.tensors()
        return [(at, tensor) for at, tensor in found if self._written is None or at in self._written]

    def learn(
        self, versions: dict[_Buffer, tuple[torch.Tensor, int]], copies: list[tuple[_Buffer, torch.Tensor]]
    ) -> None:
        """Finds which of these tensors were written since they had these versions, or values.

        Raises:
            ScheduleError: one was written that was not written in the first call.
        """
        written = {at for at, (tensor, version) in versions.items() if tensor._version != version}
        if self._written is None:  # kernels of torch's own write past the versions
            written |= {at for at, copy in copies if not _equal(copy, versions[at][0])}
            self._written = written
        if late := written - self._written:
            what = f"its forward writes to {min(at.path for at in late)}, and did not in its first call; "
            what += "recompute would write to it twice"
            raise ScheduleError(Problem(what, self._path, remedy="run it without recompute of this module"))


class StateBefore:
    """Holds a snapshot of the state before a call."""

    def __init__(self, kept: KeptState, modules: list[nn.Module]) -> None:
        self._kept = kept
        self._attributes = _attributes(modules)
        self._code = CodeState(modules, _values(modules))
        self._copies = [(at, tensor.detach().clone()) for at, tensor in kept.to_be_copied()]
        self._versions = {at: (tensor, tensor._version) for at, tensor in kept.tensors()}
        self._random = python_random_states()

    def called(self) -> None:
        """Marks the call as made, and learns which tensors it wrote."""
        self._kept.learn(self._versions, self._copies)
        if self._code.is_written():
            self._kept.refuse_writes()
        self._versions = {}

    @contextmanager
    def again(self) -> Iterator[None]:
        """Runs its body with the state of the snapshot, and then restores the present one."""
        modules = [module for module, _, _ in self._attributes]
        now, states = _attributes(modules), python_random_states()
        code = CodeState(modules, [*_values(modules), *self._code.holders])  # what the body may change
        self._put(self._attributes)
        self._code.put_back()
        written, present = self._kept._written or set(), []
        for at, copy in self._copies:
            if at in written:
                held = at.module._buffers if at.name in at.module._buffers else vars(at.module)
                present.append((held, at.name, held[at.name]))
                held[at.name] = copy.clone()
        set_python_random_states(self._random)
        try:
            yield
        finally:
            for held, name, tensor in present:
                held[name] = tensor
            self._put(now)
            code.put_back()
            set_python_random_states(states)

    @staticmethod
    def _put(attributes: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]]) -> None:
        for module, own, buffers in attributes:
            held = vars(module)
            for name in held.keys() - own.keys():
                del held[name]
            held.update(own)
            module._buffers.clear()
            module._buffers.update(buffers)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _attributes(modules: list[nn.Module]) -> list[tuple[nn.Module, dict[str, Any], dict[str, Any]]]:
    return [(module, dict(vars(module)), dict(module._buffers)) for module in modules]


def _values(modules: list[nn.Module]) -> list[Any]:
    """Returns the attributes that may have state in them; tensors are looked at by themselves."""
    return [
        value
        for module in modules
        for name, value in vars(module).items()
        if name not in _OF_TORCH and not isinstance(value, torch.Tensor)
    ]
