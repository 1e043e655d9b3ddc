"""Runs a traced module: one graph for each form of call, made at the first such call."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from megasched.analysis.notes.attribute_values import attributes_of
from megasched.errors import Problem, ScheduleError
from megasched.graph.capture import Graph, capture
from megasched.graph.intercept import Limits
from megasched.graph.opaque import TensorTree
from megasched.graph.partition import Edit, apply_edit

# Forms of call (shapes, types, training or not, hooked or not, numbers in attributes) beyond which a module is
# reported; each costs a trace.
FEW = 8
_PLAIN = bool | int | float | str | None | torch.dtype | torch.device


class TracedModule:
    """Replaces a module's forward; the module, its class, paths and parameters stay.

    Attributes:
        edits: edits of each graph.
        graphs: form of call -> graph.
    """

    def __init__(
        self,
        root: nn.Module,
        limits: Limits,
        *,
        path: str = "",
        source: str = "",
        probe: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.root, self.limits, self.path, self.source, self.probe = root, limits, path, source, probe
        self.inner = root.forward
        self.edits: list[Edit] = []
        self.graphs: dict[Any, Graph] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call, tensors = TensorTree.take((args, kwargs))
        key = self._form(args, kwargs, call, tensors)
        graph = self.graphs.get(key)
        if graph is None:
            graph = self.graphs[key] = self._trace(args, kwargs)
        for path in graph.owners():
            self.limits.wait(self.root.get_submodule(path))
        return graph.run(self.root, tensors)

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
        graph = capture(
            self.root,
            self.inner,
            args,
            kwargs,
            self.limits,
            path=self.path,
            source=self.source,
            probe=self.probe,
        )
        for edit in self.edits:
            apply_edit(graph, edit, self.path)
        if len(self.graphs) == FEW:
            warnings.warn(
                f"megasched: {self.path or 'the model'} is traced for more than {FEW} forms of call; each new "
                "shape costs a trace, and each new number in an attribute: pad the batches to one length",
                stacklevel=3,
            )
        return graph

    def _form(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], call: TensorTree, tensors: list[torch.Tensor]
    ) -> Any:
        for name, value in [*enumerate(args), *kwargs.items()]:
            strange = _strange(value)
            if strange is not None:
                what = f"argument {name!r} is or holds a {type(strange).__name__}, which a graph can't take"
                remedy = "call the model with use_cache=False" if "Cache" in type(strange).__name__ else ""
                raise ScheduleError(Problem(what, self.path, self.source, remedy or "don't trace this module"))
        casts = tuple(
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in ("cpu", "cuda")
        )
        seen: set[int] = set()
        return (
            call.spec,
            tuple((t.shape, t.dtype, t.device, t.requires_grad) for t in tensors),
            tuple((type(value), value) for value in call.others),
            tuple(module.training for module in self.root.modules()),
            tuple(self.limits.hooked(self.root)),
            tuple(tuple(attributes_of(module, seen)) for module in self.limits.shown(self.root)),
            tuple((p.dtype, p.device) for p in self.root.parameters()),
            torch.is_grad_enabled(),
            casts,
        )


def _strange(value: Any) -> Any:
    """Returns a value in an argument that is neither a tensor nor plain data, such as a cache, or None."""
    if isinstance(value, torch.Tensor | _PLAIN):
        return None
    if isinstance(value, dict):
        value = list(value.values())
    elif not isinstance(value, list | tuple):
        return value
    return next((found for item in value if (found := _strange(item)) is not None), None)


def trace_module(root: nn.Module, limits: Limits, **details: Any) -> TracedModule:
    """Replaces the module's forward by a ``TracedModule``, and returns it."""
    traced = TracedModule(root, limits, **details)

    @functools.wraps(traced.inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return traced(*args, **kwargs)

    root.forward = forward
    return traced
