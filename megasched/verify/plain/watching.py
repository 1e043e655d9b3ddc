"""Watches what modules take and give in one forward, and the gradients that come back.

It sees alike in a rank and in the plain model, and imports torch alone. It also computes in float64 and switches
dropouts off.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

Event = tuple[str, Literal["in", "out"]]
# What transformers (integrations/moe.py) leaves on most modules that hold all of a layer's experts.
_OF_EXPERTS = "is_transposed"


@dataclass
class Sightings:
    """Holds the first floating-point tensor of each event.

    Attributes:
        order: events (path of a module, ``in`` or ``out``) as they happened.
        values: the tensor of each event.
        gradients: gradient of the loss with respect to that tensor.
        sources: module -> the module whose output it takes unchanged, if there is one.
    """

    order: list[Event] = field(default_factory=list)
    values: dict[Event, torch.Tensor] = field(default_factory=dict)
    gradients: dict[Event, torch.Tensor] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def merge(self, other: Sightings) -> None:
        self.order += other.order
        self.values |= other.values
        self.gradients |= other.gradients
        self.sources |= other.sources


class Watch:
    """Watches a running model; each module is seen once, in the first forward that it is part of.

    Its hooks are the last to see a module's input and output, so that what a lowering puts around a module counts
    as the module's. Inside of a layer's experts nothing is seen: in which order an expert's tokens come there is
    left to a sort that is not stable, and a rank may have some of them.
    """

    def __init__(self, model: nn.Module, paths: Collection[str]) -> None:
        """Registers hooks on the modules at ``paths``."""
        self.seen = Sightings()
        self._made: dict[int, str] = {}
        self._kept: list[torch.Tensor] = []  # so that no id comes to stand for another tensor
        self._handles = []
        modules = dict(model.named_modules())
        experts = tuple(f"{path}." for path, module in modules.items() if _holds_experts(module))
        for path, module in modules.items():
            if path in paths and not path.startswith(experts):
                self._handles += [
                    module.register_forward_pre_hook(self._before(path), with_kwargs=True),
                    module.register_forward_hook(self._after(path)),
                ]

    def close(self) -> Sightings:
        """Stops watching modules and returns what was seen; gradients are still noted in it."""
        for handle in self._handles:
            handle.remove()
        self._made.clear()
        self._kept.clear()
        return self.seen

    def _before(self, path: str) -> Any:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._see((path, "in"), (args, kwargs))

        return before

    def _after(self, path: str) -> Any:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._see((path, "out"), output)

        return after

    def _see(self, event: Event, value: Any) -> None:
        recomputed = torch._C._current_graph_task_id() != -1  # inside a backward
        leaves = (one for one in tree_leaves(value) if isinstance(one, torch.Tensor))
        tensor = next((one for one in leaves if one.is_floating_point()), None)
        if tensor is None or event in self.seen.values or recomputed:
            return
        path, kind = event
        if kind == "in" and id(tensor) in self._made:
            self.seen.sources[path] = self._made[id(tensor)]
        if kind == "out":
            self._made.setdefault(id(tensor), path)
        self._kept.append(tensor)
        self.seen.order.append(event)
        self.seen.values[event] = tensor.detach().clone()
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self._note_gradient(event, gradient))

    def _note_gradient(self, event: Event, gradient: torch.Tensor) -> None:
        self.seen.gradients[event] = gradient.detach().clone()


def _holds_experts(module: nn.Module) -> bool:
    """Returns whether a module holds all of a layer's experts: by HF's mark, or in several stacks of matrices."""
    stacks = [held for held in module.parameters(recurse=False) if held.dim() == 3]
    bare = not any(True for child in module.children() for _ in child.parameters())
    return hasattr(module, _OF_EXPERTS) or (len(stacks) > 1 and bare)


class Float64(TorchFunctionMode):
    """Gives float64 to code that asks for float32 or for no dtype, as some code of definitions always does."""

    def __enter__(self) -> Self:
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        torch.set_default_dtype(self._default)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {name: torch.float64 if arg is torch.float32 else arg for name, arg in (kwargs or {}).items()}
        return func(*args, **kwargs)


def silence(model: nn.Module) -> list[str]:
    """Switches every dropout off, also those that no config field sets; returns the paths of those that were on.

    A dropout is an ``nn.Dropout``, or an attribute of a module that is a float and has ``drop`` in its name.
    """
    found = []
    for path, module in model.named_modules():
        names = [name for name, value in vars(module).items() if isinstance(value, float) and "drop" in name]
        names += ["p"] if isinstance(module, nn.modules.dropout._DropoutNd) else []
        on = [name for name in names if getattr(module, name)]
        for name in on:
            setattr(module, name, 0.0)
        found += [path] if on else []
    return found
