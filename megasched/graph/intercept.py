"""Intercepts calls while a module's graph is made: leaves become opaque, and lossy operations are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn

from megasched.attributes import replaced
from megasched.graph import opaque
from megasched.language.lora import is_conv1d

Hook = Callable[..., Any]
_SEEDS = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all")


def _never(hook: Hook) -> bool:
    return False


@dataclass
class Limits:
    """Describes how far the trace of one module goes.

    Attributes:
        leaves: paths, from the traced module, of submodules that stay calls.
        decomposed: path of a linear -> whether its product stays a call of the live module, which then adds no
            bias itself; otherwise the product is an operation of the graph.
        waits: returns whether a forward pre-hook only waits for its module's own parameters. Other hooks keep a
            module a call; one that waits does not, and runs before the graph that reads those parameters.
    """

    leaves: frozenset[str] = frozenset()
    decomposed: Mapping[str, bool] = field(default_factory=dict)
    waits: Callable[[Hook], bool] = _never

    def is_hooked(self, module: nn.Module) -> bool:
        """Returns whether hooks keep the module a call."""
        before = [hook for hook in module._forward_pre_hooks.values() if not self.waits(hook)]
        others = (module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
        return bool(before) or any(others)

    def hooked(self, module: nn.Module, prefix: str = "") -> Iterator[str]:
        """Yields the paths of modules below that only hooks keep calls."""
        for name, child in module.named_children():
            path = prefix + name
            if path in self.leaves and path not in self.decomposed:
                continue
            if self.is_hooked(child):
                yield path
            else:
                yield from self.hooked(child, f"{path}.")

    def shown(self, module: nn.Module, prefix: str = "") -> Iterator[nn.Module]:
        """Yields the module and those below whose code a graph shows: neither they nor one around is a call."""
        yield module
        for name, child in module.named_children():
            path = prefix + name
            if path in self.decomposed or not (path in self.leaves or self.is_hooked(child)):
                yield from self.shown(child, f"{path}.")

    def wait(self, module: nn.Module) -> None:
        """Runs the module's hooks that wait for its parameters."""
        for hook in filter(self.waits, list(module._forward_pre_hooks.values())):
            hook(module, ())

    @contextmanager
    def waiting_for_none(self, root: nn.Module) -> Iterator[None]:
        """Runs its body without hooks that wait: a run whose results do not count needs no values."""
        tables = {module: module._forward_pre_hooks for module in root.modules()}
        for module, table in tables.items():
            if table:
                module._forward_pre_hooks = type(table)((k, h) for k, h in table.items() if not self.waits(h))
        try:
            yield
        finally:
            for module, table in tables.items():
                module._forward_pre_hooks = table


class Lost(Exception):
    """Reports an operation that a graph would lose.

    Attributes:
        remedy: a remedy other than keeping the module a call, or empty.
    """

    def __init__(self, what: str, remedy: str = "") -> None:
        self.remedy = remedy
        super().__init__(f"{what} would be lost in a graph")


@contextmanager
def intercepting(root: nn.Module, limits: Limits) -> Iterator[None]:
    """Runs its body with intercepted calls, but only in a thread that is recording.

    Calls of ``root``'s leaves stay calls, and so does attention through HF's ``AttentionInterface``; code that
    acts only on gradients raises Lost.
    """
    paths = {id(vars(module)): path for path, module in root.named_modules()}
    run_module, apply_function = nn.Module.__call__, torch.autograd.Function.__dict__["apply"]
    hook_tensor = torch.Tensor.register_hook

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        current = opaque.active()
        path = paths.get(id(vars(module)), "")
        if current is None or current.inside or not path:
            return run_module(module, *args, **kwargs)
        if path in limits.decomposed:
            if limits.is_hooked(module):
                raise Lost("hooks of a linear that is decomposed", "leave the hook or the decompose call out")
            with (
                current.within(module),
                _forward_of(module, partial(_decomposed, root, path, module, limits.decomposed[path])),
            ):
                return run_module(module, *args, **kwargs)  # through the call, so that operations are named by it
        with current.within(module):
            if path in limits.leaves or limits.is_hooked(module):
                return opaque.call(path, partial(_live, root, path), *args, **kwargs)
            return run_module(module, *args, **kwargs)

    def apply(function: type, *args: Any, **kwargs: Any) -> Any:
        current = opaque.active()
        # An operator registered with torch.library is one node of a graph, and brings its backward.
        registered = function.__module__.startswith("torch._library")
        if current is not None and not current.inside and not registered:
            name = f"{function.__module__}.{function.__qualname__}"
            raise Lost(f"the backward of {name}, a custom autograd function,")
        return apply_function.__get__(None, function)(*args, **kwargs)

    def register_hook(tensor: torch.Tensor, hook: Hook) -> Any:
        current = opaque.active()
        if current is not None and not current.inside:
            name = getattr(hook, "__qualname__", repr(hook))
            raise Lost(f"{name}, which register_hook puts on the gradient of a tensor,")
        return hook_tensor(tensor, hook)

    with (
        _refused_reads(),
        _refused_seeds(),
        replaced(nn.Module, "__call__", run),
        replaced(torch.autograd.Function, "apply", classmethod(apply)),
        replaced(torch.Tensor, "register_hook", register_hook),
        _opaque_attention(paths),
    ):
        yield


@contextmanager
def _refused_reads() -> Iterator[None]:
    """Runs its body so that a recording begins and refuses to read what live calls set."""

    def read(module: nn.Module, name: str) -> Any:
        current = opaque.active()
        if current is not None and current.gone and not name.startswith("__"):
            current.refuse_read(module, name)
        return object.__getattribute__(module, name)

    recording = opaque.active()
    if recording is not None:
        recording.start()
    if recording is None or not any(made.leaves for made in recording.calls):
        yield
        return
    with replaced(nn.Module, "__getattribute__", read):
        yield


@contextmanager
def _refused_seeds() -> Iterator[None]:
    """Runs its body so that code that sets the state of a random generator of torch raises Lost."""

    def refusing(function: Callable[..., Any]) -> Callable[..., Any]:
        def set_state(*args: Any, **kwargs: Any) -> Any:
            current = opaque.active()
            if current is not None and not current.inside:
                raise Lost(f"a random state that {function.__name__} sets")
            return function(*args, **kwargs)

        return set_state

    with ExitStack() as undo:
        for owner, name in product((torch, torch.random, torch.cuda, torch.cuda.random), _SEEDS):
            if (function := getattr(owner, name, None)) is not None:
                undo.enter_context(replaced(owner, name, refusing(function)))
        yield


def _live(root: nn.Module, path: str, *args: Any, **kwargs: Any) -> Any:
    """Calls the module that is at this path now, with its hooks and the wrappers of its forward."""
    return root.get_submodule(path)(*args, **kwargs)


@contextmanager
def _forward_of(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Runs its body so that the module's next call runs ``function`` instead of its forward."""
    own = vars(module).get("forward")

    def restore() -> None:
        vars(module).pop("forward", None)
        if own is not None:
            module.forward = own

    def forward(*args: Any, **kwargs: Any) -> Any:
        restore()
        return function(*args, **kwargs)

    module.forward = forward
    try:
        yield
    finally:
        restore()


def _decomposed(root: nn.Module, path: str, module: nn.Module, live: bool, x: torch.Tensor) -> torch.Tensor:
    """Computes a linear as product and bias: [..., in] -> [..., out]."""
    if live:
        product = opaque.call(f"{path}.matmul", partial(_live, root, path), x)
    else:
        weight = module.weight if is_conv1d(module) else module.weight.t()
        product = torch.matmul(x, weight)
    return product if module.bias is None else product + module.bias


@contextmanager
def _opaque_attention(paths: Mapping[int, str]) -> Iterator[None]:
    """Runs its body with attention as one call, named ``<module>.attention``.

    Its kernel is chosen when the model is built: it may be Transformer Engine's, draw its own random numbers or be
    recomputed.
    """
    from transformers import AttentionInterface as interface

    found = interface.get_interface

    def get_interface(self: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        function = found(self, *args, **kwargs)

        def attend(module: nn.Module, *tensors: Any, **options: Any) -> Any:
            path = paths.get(id(vars(module)), "")
            name = f"{path}.attention" if path else "attention"
            return opaque.call(name, partial(function, module), *tensors, **options)

        return attend

    with replaced(interface, "get_interface", get_interface):
        yield
