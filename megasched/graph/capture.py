"""Captures one call of a module as a graph, by ``torch.export`` of the code that the call runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from megasched.errors import Problem, ScheduleError
from megasched.graph import opaque
from megasched.graph.explain import explain
from megasched.graph.intercept import Limits, intercepting
from megasched.graph.naming import name_nodes

_PREFIX = "root."
# Checks of types that hold by construction; as nodes without users they would stand in every pattern's way.
_CHECKS = (torch.ops.aten._assert_tensor_metadata.default, torch.ops.aten._assert_scalar.default)


@dataclass
class Graph:
    """Holds the operations of one call of a module.

    Attributes:
        module: runs on ``[*state, *constants, *inputs]`` in the order of ``feeds`` and returns a list of tensors.
        feeds: value of each placeholder: a parameter or buffer by its name in the traced module, a constant, or
            the input of that number.
        result: structure of the module's result.
        names: name -> operation, in the order in which they run.
        inputs: names of placeholders.
    """

    module: fx.GraphModule
    feeds: list[str | torch.Tensor | int]
    result: opaque.TensorTree
    names: dict[str, fx.Node] = field(default_factory=dict)
    inputs: dict[str, fx.Node] = field(default_factory=dict)

    def run(self, root: nn.Module, tensors: list[torch.Tensor]) -> Any:
        """Runs the call with the present parameters and buffers of the module."""
        values = []
        for feed in self.feeds:
            if isinstance(feed, str):
                path, _, name = feed.rpartition(".")
                values.append(getattr(root.get_submodule(path), name))
            else:
                values.append(tensors[feed] if isinstance(feed, int) else feed)
        return self.result.put(self.module(*values))

    def owners(self) -> list[str]:
        """Returns the paths of the modules whose parameters and buffers it reads."""
        return list(dict.fromkeys(feed.rpartition(".")[0] for feed in self.feeds if isinstance(feed, str)))


class _Entry(nn.Module):
    """Wraps a call for export: it takes the call's tensors alone, and makes the call with them."""

    def __init__(
        self, root: nn.Module, forward: Callable[..., Any], call: opaque.TensorTree, limits: Limits
    ) -> None:
        super().__init__()
        self.root = root
        self.inner, self.call, self.limits = forward, call, limits
        self.result: opaque.TensorTree | None = None

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        args, kwargs = self.call.put(tensors)
        with intercepting(self.root, self.limits):  # here: export itself replaces how modules are called
            self.result, found = opaque.TensorTree.take(self.inner(*args, **kwargs))
        return found


def capture(
    root: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    limits: Limits,
    *,
    path: str = "",
    source: str = "",
    probe: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Graph:
    """Returns the graph of ``forward(*args, **kwargs)``, where ``forward`` is that of ``root``.

    The call is run once without autograd (the probe), then exported. The export runs in its own thread, so that
    modes and hooks around the call (recomputation, an emulated device) do not affect it.

    Args:
        path, source: of the module and of the caller, for the message of an error.
        probe: surrounds the probe; restores random states.

    Raises:
        ScheduleError: it can't be traced; names the module, its line and a remedy.
    """
    call, tensors = opaque.TensorTree.take((args, kwargs))
    calls = opaque.Recording()
    entry = _Entry(root, forward, call, limits)
    try:
        with limits.waiting_for_none(root):
            with opaque.recording(calls), torch.no_grad(), probe():
                entry(*tensors)
            _enter_fake_tensors_here()
            with ThreadPoolExecutor(1) as thread:
                program = thread.submit(_export, entry, tensors, calls, _surroundings()).result()
    except Exception as error:
        raise ScheduleError(explain(error, root, path, source)) from error
    return _graph_of(program, entry, calls, list(_argument_names(forward, args, kwargs)), path, source)


def _enter_fake_tensors_here() -> None:
    """Enters an export's mode in this thread, before a thread that will end does so for the first time.

    On a machine without a GPU torch 2.11 sets a guard then, which has to outlive the thread that sets it.
    """
    with FakeTensorMode():
        return


def _surroundings() -> tuple[bool, list[tuple[str, torch.dtype]], int | None]:
    """Returns this thread's state that a graph depends on: gradient recording, autocast, and the device."""
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    return torch.is_grad_enabled(), casts, device


def _export(
    entry: _Entry, tensors: list[torch.Tensor], calls: opaque.Recording, surroundings: Any
) -> torch.export.ExportedProgram:
    grad, casts, device = surroundings
    examples = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors)
    calls.made = 0
    with ExitStack() as stack:
        if device is not None:
            stack.enter_context(torch.cuda.device(device))
        for kind, dtype in casts:
            stack.enter_context(torch.autocast(kind, dtype))
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(opaque.recording(calls))
        return torch.export.export(entry, examples, strict=False)


def _graph_of(
    program: torch.export.ExportedProgram,
    entry: _Entry,
    calls: opaque.Recording,
    arguments: list[str],
    path: str,
    source: str,
) -> Graph:
    module = program.graph_module
    signature = program.graph_signature
    written = [spec.target for spec in signature.output_specs if spec.kind is not OutputKind.USER_OUTPUT]
    if written:
        what = f"writes to {', '.join(str(name).removeprefix(_PREFIX) for name in written)} in its forward"
        remedy = "keep the module that does so a call: trace(leaves=[...])"
        raise ScheduleError(Problem(what, path, source, remedy))
    for part in [m for m in module.modules() if isinstance(m, fx.GraphModule)]:
        _put_calls(part, calls)
    feeds: list[str | torch.Tensor | int] = []
    titles: list[str] = []
    for spec in signature.input_specs:
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            feeds.append(str(spec.target).removeprefix(_PREFIX))
            titles.append(feeds[-1])
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            feeds.append(program.constants[str(spec.target)])
            titles.append(f"constant.{spec.target}")
        else:
            feeds.append(sum(isinstance(feed, int) for feed in feeds))
            titles.append(arguments[feeds[-1]])
    assert entry.result is not None
    graph = Graph(module, feeds, entry.result)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    graph.inputs = dict(zip(titles, placeholders, strict=True))
    graph.names = name_nodes(module.graph, _PREFIX.rstrip("."))
    return graph


def _put_calls(module: fx.GraphModule, calls: opaque.Recording) -> None:
    """Replaces the markers of live calls by the calls."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.target in _CHECKS:
            graph.erase_node(node)
        elif node.target is torch.ops.megasched.opaque.default:
            index, tensors = node.args
            made = calls.calls[index]
            function = _as_function(made)
            with graph.inserting_before(node):
                live = graph.call_function(function, tuple(tensors))
            live.meta = {**node.meta, "opaque": made.name}
            if len(made.shapes) == 1:
                for item in list(node.users):  # the marker returns a list, the call its one tensor
                    live.meta["val"] = item.meta.get("val")
                    item.replace_all_uses_with(live)
                    graph.erase_node(item)
            node.replace_all_uses_with(live)
            graph.erase_node(node)
    module.recompile()


def _as_function(made: opaque.OpaqueCall) -> Callable[..., Any]:
    """Returns the call as a function with a name, which the code of a graph needs."""

    def live(*tensors: torch.Tensor) -> Any:
        return made(*tensors)

    live.__name__ = live.__qualname__ = "".join(c if c.isalnum() else "_" for c in made.name)
    return live


def _argument_names(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Returns the names of a call's tensors: the parameter, and the place in it if it holds several."""
    try:
        bound = inspect.signature(forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        bound = {"args": args, "kwargs": kwargs}
    # The order in which a call's structure is flattened is that of args and then of kwargs.
    titles = {id(value): name for name, value in bound.items() if not isinstance(value, bool | int | float | None)}
    found = []
    for index, value in [*enumerate(args), *kwargs.items()]:
        title = index if isinstance(index, str) else titles.get(id(value), f"args.{index}")
        for keys, leaf in pytree.tree_flatten_with_path(value)[0]:
            if isinstance(leaf, torch.Tensor):
                found.append(".".join([title, *(pytree.keystr((key,)).strip("[]'.") for key in keys)]))
    names: dict[str, int] = {}
    for place, name in enumerate(found):
        names[name] = names.get(name, -1) + 1
        found[place] = f"{name}_{names[name]}" if names[name] else name
    return found
