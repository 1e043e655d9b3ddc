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
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from megasched.analysis.notes.restorable_state import RestorableState, restored
from megasched.analysis.recording.chance import PythonDraws
from megasched.errors import ScheduleError
from megasched.graph import effects, opaque
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
        feeds: value of each placeholder: a parameter, a buffer or another attribute by its name in the traced
            module, a constant, or the input of that number.
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
        self, root: nn.Module, forward: Callable[..., Any], call: opaque.TensorTree, limits: Limits, *, trial: bool
    ) -> None:
        super().__init__()
        self.root = root
        self.inner, self.call, self.limits, self.trial = forward, call, limits, trial
        self.result: opaque.TensorTree | None = None

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        recording = opaque.active()
        assert recording is not None
        probe = recording.made is None  # in which what stays a call runs, too
        args, kwargs = self.call.put(tensors)
        with (
            intercepting(self.root, self.limits),  # here: export itself replaces how modules are called
            restored(self.root, values=probe, outside=self.trial) as before,
        ):
            draws, start = PythonDraws(), RestorableState(self.root, values=False, outside=False)
            output = self.inner(*args, **kwargs)
            if probe:
                recording.elsewhere = effects.changed_elsewhere(start, self.root, recording)
            else:
                effects.refuse_changes(before, self.root, recording, trial=self.trial)
                effects.refuse_changed_arguments(self.call, tensors, (args, kwargs))
            if self.trial and probe:
                effects.refuse_changes_outside(before, self.root)
            elif self.trial:
                effects.refuse_draws(draws)
            self.result, found = opaque.TensorTree.take(output)
            if not probe:
                effects.refuse_result(self.result)
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
    trial: bool = False,
) -> Graph:
    """Returns the graph of ``forward(*args, **kwargs)``, where ``forward`` is that of ``root``.

    The call is run once without autograd (the probe), then exported; neither changes what the module's code keeps.
    The export runs in its own thread, so that modes and hooks around the call (recomputation, an emulated device)
    do not affect it.

    Args:
        path, source: of the module and of the caller, for the message of an error.
        probe: surrounds the probe; restores random states.
        trial: whether nothing but this runs, as while a schedule is written: then what the code changes outside
            of modules is looked at, too.

    Raises:
        ScheduleError: it can't be traced; names the module, its line and a remedy.
    """
    call, tensors = opaque.TensorTree.take((args, kwargs))
    calls = opaque.Recording(root, (path, source))
    entry = _Entry(root, forward, call, limits, trial=trial)
    try:
        with limits.waiting_for_none(root):
            copies = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
            with opaque.recording(calls), torch.no_grad(), probe(), effects.Strangers(root, copies):
                entry(*copies)
            _enter_fake_tensors_here()
            with ThreadPoolExecutor(1) as thread:
                program = thread.submit(_export, entry, tensors, calls, _surroundings()).result()
            return _graph_of(program, entry, calls, list(_argument_names(forward, args, kwargs)))
    except Exception as error:
        raise ScheduleError(explain(error, root, path, source)) from error


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
    program: torch.export.ExportedProgram, entry: _Entry, calls: opaque.Recording, arguments: list[str]
) -> Graph:
    module = program.graph_module
    feeds: list[str | torch.Tensor | int] = []
    titles: list[str] = []
    names: list[str] = []  # as users know them
    for spec in program.graph_signature.input_specs:
        name = str(spec.target).removeprefix(_PREFIX)
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            feeds.append(name)
            titles.append(name)
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            constant = program.constants[str(spec.target)]
            feeds.append(name if _attribute(entry.root, name) is constant else constant)
            titles.append(f"constant.{spec.target}")
        elif spec.kind is InputKind.USER_INPUT:
            feeds.append(sum(isinstance(feed, int) for feed in feeds))
            titles.append(name := arguments[feeds[-1]])
        else:
            raise effects.Unfit(f"it reads an object that a graph can't take ({spec.kind.name})")
        names.append(name)
    assert entry.result is not None
    graph = Graph(module, feeds, entry.result)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    graph.inputs = dict(zip(titles, placeholders, strict=True))
    effects.refuse_writes(entry.root, module, names)
    for part in [m for m in module.modules() if isinstance(m, fx.GraphModule)]:
        _put_calls(part, calls)
    graph.names = name_nodes(module.graph, _PREFIX.rstrip("."))
    return graph


def _attribute(root: nn.Module, name: str) -> Any:
    """Returns what an attribute of a module below ``root`` holds, or None where there is no such attribute."""
    path, _, own = name.rpartition(".")
    try:
        return getattr(root.get_submodule(path), own, None)
    except AttributeError:
        return None


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
            # by number of its tensors, of which one may be handed over twice
            written = [live.all_input_nodes.index(tensors[number]) for number in made.writes]
            live.meta = {**node.meta, "opaque": made.name, "writes": written}
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
