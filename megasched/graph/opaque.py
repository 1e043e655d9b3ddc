"""Keeps calls opaque in a traced graph: code that a graph must not look into runs live, in its present state.

Megatron's parallel layers communicate in custom autograd functions, whose backward a trace through them
would silently lose. So a call of such a module, or of a function given to ``call``, becomes one node.
While the graph is made, the node's result has the shapes and types that the real call returned in a run just
before it (the *probe*), so that local sizes of a TP rank show; while the graph runs, the real call is made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from megasched.errors import MegaschedError

_HOLE = object()  # where a tensor stands in a flattened structure


@dataclass
class TensorTree:
    """Represents nested arguments or results: the places of the tensors, and all other values."""

    spec: pytree.TreeSpec
    leaves: list[Any]

    @classmethod
    def take(cls, value: Any) -> tuple[TensorTree, list[torch.Tensor]]:
        """Returns the structure of a value, and its tensors in order."""
        leaves, spec = pytree.tree_flatten(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return cls(spec, [_HOLE if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]), tensors

    def put(self, tensors: Any) -> Any:
        """Returns the value with these tensors in it."""
        given = iter(tensors)
        return pytree.tree_unflatten([next(given) if leaf is _HOLE else leaf for leaf in self.leaves], self.spec)

    @property
    def others(self) -> list[Any]:
        """Returns all values in it that are no tensors."""
        return [leaf for leaf in self.leaves if leaf is not _HOLE]


@dataclass
class OpaqueCall:
    """Represents a call that stays one node.

    Attributes:
        name: name of the node, e.g. ``self_attn.q_proj``.
        function: the live call.
        shapes: (shape, dtype, device) of each tensor that it returned in the probe.
        result: structure of its result.
        arguments: structure of (args, kwargs); set once the graph is made.
    """

    name: str
    function: Callable[..., Any]
    shapes: list[tuple[torch.Size, torch.dtype, torch.device]]
    result: TensorTree
    arguments: TensorTree | None = None

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Makes the live call, and returns its tensors: a single one, or a tuple of several."""
        assert self.arguments is not None
        args, kwargs = self.arguments.put(tensors)
        _, found = TensorTree.take(self.function(*args, **kwargs))
        return found[0] if len(self.shapes) == 1 else tuple(found)


@dataclass
class Recording:
    """Holds the opaque calls of one trace, in the order in which they are made."""

    calls: list[OpaqueCall] = field(default_factory=list)
    made: int | None = None  # while the graph is made: how many calls have come; None in the probe
    inside: bool = False  # in the probe, inside of an opaque call: what it calls is its own affair


_local = threading.local()  # a graph is made in a thread of its own


def active() -> Recording | None:
    """Returns the recording of the trace in progress in this thread, or None."""
    return getattr(_local, "recording", None)


@contextmanager
def recording(to: Recording) -> Iterator[None]:
    before, _local.recording = active(), to
    try:
        yield
    finally:
        _local.recording = before


def call(name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Calls ``function(*args, **kwargs)``, which stays one call in the graph of a module that is being traced."""
    current = active()
    if current is None or current.inside:
        return function(*args, **kwargs)
    if current.made is None:
        current.inside = True
        try:
            output = function(*args, **kwargs)
        finally:
            current.inside = False
        result, tensors = TensorTree.take(output)
        shapes = [(t.shape, t.dtype, t.device) for t in tensors]
        current.calls.append(OpaqueCall(name, function, shapes, result))
        return output
    index, current.made = current.made, current.made + 1
    if index >= len(current.calls) or current.calls[index].name != name:
        raise MegaschedError(f"the forward calls {name} now, which it did not in the run before: it is not static")
    made = current.calls[index]
    made.function = function
    made.arguments, tensors = TensorTree.take((args, kwargs))
    return made.result.put(torch.ops.megasched.opaque(index, tensors))


torch.library.define("megasched::opaque", "(int index, Tensor[] tensors) -> Tensor[]")


@torch.library.register_fake("megasched::opaque")
def _opaque_shapes(index: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    current = active()
    assert current is not None
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in current.calls[index].shapes]


def _no_backward(ctx: Any, *gradients: Any) -> Any:
    raise MegaschedError("a marker of a live call is never run")


# So that what depends on a marker requires gradients while the graph is made, as it does when the graph runs.
torch.library.register_autograd("megasched::opaque", _no_backward)
