"""Finds what a traced module's code does beside returning a result, which its graph would not do again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from megasched.analysis.notes.restorable_state import RestorableState
from megasched.analysis.recording.chance import PythonDraws
from megasched.analysis.recording.meta_call import tensors_in
from megasched.analysis.recording.operators import arguments_of, storage_of, written
from megasched.graph import opaque
from megasched.graph.intercept import Lost
from megasched.graph.opaque import Unfit

_TRAINS = ("training", "use_input_stats")  # arguments of kernels that then write to these, as no schema says:
_STATISTICS = ("running_mean", "running_var")


def changed_elsewhere(before: RestorableState, root: nn.Module, calls: opaque.Recording) -> list[str]:
    """Returns the names of what has changed since ``before``, but for what live calls changed in their modules."""
    names = before.changed(RestorableState(root, values=False, outside=False))
    return [name for name in names if name not in calls.changed and not name.startswith("len(")]


def refuse_changes(before: RestorableState, root: nn.Module, calls: opaque.Recording, *, trial: bool) -> None:
    """Refuses code that has changed what it keeps in Python since ``before``.

    Args:
        calls: its live calls, which have run in the probe alone.
        trial: whether ``before`` holds what is outside of modules.

    Raises:
        Unfit: it has, or a live call has changed what another module keeps.
    """
    names = before.changed(RestorableState(root, values=False, outside=trial))
    if names:
        # What is in a container, and how long that is, are names of their own.
        names = [name for name in names if not name.startswith("len(")] or names
        homes = [path for path, _ in root.named_modules() if path and names[0].startswith(f"{path}.")]
        what = f"its code changes {_listed(names)}, which it keeps between calls and a graph would not"
        raise Unfit(what, max(homes, key=len, default=""))
    if calls.elsewhere:
        what = (
            f"a module that stays a call changes {_listed(calls.elsewhere)} outside of it, which a graph may read"
        )
        raise Unfit(what, remedy="keep the modules that share it in one that stays a call, or leave the trace out")


def refuse_changes_outside(before: RestorableState, root: nn.Module) -> None:
    """Refuses code that has changed globals or classes since ``before``, live calls included.

    Raises:
        Unfit: it has.
    """
    if names := before.changed_outside(RestorableState(root, values=False, outside=True)):
        what = f"its code changes {_listed(names)} outside of modules, and what stays a call runs once more"
        raise Unfit(what, remedy="keep that in an attribute of a module that stays a call, or leave the trace out")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def refuse_draws(draws: PythonDraws) -> None:
    """Refuses code that has drawn random numbers of Python's or numpy's.

    Raises:
        Unfit: it has.
    """
    if draws.drawn():
        raise Unfit("its code draws random numbers of Python's or numpy's, and a graph would keep the first ones")


def refuse_changed_arguments(call: opaque.TensorTree, tensors: Iterable[torch.Tensor], now: Any) -> None:
    """Refuses code that has put something else into the lists and dictionaries that it was handed.

    Args:
        call, tensors: its arguments before.
        now: its arguments after, as (args, kwargs).

    Raises:
        Unfit: it has.
    """
    if not call.is_of(tensors, now):
        raise Unfit("its code changes a list or dictionary that it is handed, and a graph would not")


def refuse_result(result: opaque.TensorTree) -> None:
    """Refuses a result in which there is more than tensors and plain data, such as a number made of a tensor.

    Raises:
        Unfit: there is.
    """
    if result.objects:
        kind = type(result.objects[0])
        what = f"it returns a {kind.__name__}, which a graph can't look into"
        if kind.__name__.startswith("Sym"):
            what = "it returns a number that it makes of a tensor, and a graph would return the first one"
        raise Unfit(what)


def refuse_writes(root: nn.Module, module: fx.GraphModule, names: Iterable[str]) -> None:
    """Refuses a graph that writes to what it reads: parameters, buffers, constants and inputs.

    Args:
        root: the traced module.
        names: names of what the graph reads, in the order of its placeholders.

    Raises:
        Unfit: it does.
    """
    read = [node.meta.get("val") for node in module.graph.nodes if node.op == "placeholder"]
    known = {storage_of(value): name for value, name in zip(read, names, strict=True)}
    found: dict[str, None] = {}
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            if isinstance(node.target, torch._ops.OpOverload):
                found |= {known[at]: None for at in map(storage_of, written_by(node)) if at in known}
    if found:
        owner = min(found).rpartition(".")[0]
        is_module = any(path == owner for path, _ in root.named_modules())
        raise Unfit(f"it writes to {', '.join(sorted(found))} in its forward", owner if is_module else "")


def tensors_of(nodes: Iterable[fx.Node]) -> Iterator[torch.Tensor]:
    """Yields the tensors that these operations of a graph return, as they were when it was made."""
    for node in nodes:
        yield from tensors_in(node.meta.get("val"))


def written_by(node: fx.Node) -> list[torch.Tensor]:
    """Returns the tensors to which an operation of a graph writes; of a region that does, all that it reads."""
    if "writes" in node.meta:
        return list(tensors_of(node.all_input_nodes[index] for index in node.meta["writes"]))
    if isinstance(node.target, torch._ops.OpOverload):
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta.get("val"))
        return [*written(node.target, args, kwargs), *_statistics(node.target, args, kwargs)]
    owner = node.graph.owning_module
    parts = [getattr(owner, str(one.target)) for one in node.all_input_nodes if one.op == "get_attr"]
    regions = [inner for part in parts if isinstance(part, fx.GraphModule) for inner in part.modules()]
    inside = (one for region in regions if isinstance(region, fx.GraphModule) for one in region.graph.nodes)
    return list(tensors_of(node.all_input_nodes)) if any(written_by(one) for one in inside) else []


def _statistics(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Returns running statistics that an operation writes to."""
    told = arguments_of(func, args, kwargs)
    if not any(told.get(name) for name in _TRAINS):
        return []
    return [told[name] for name in _STATISTICS if isinstance(told.get(name), torch.Tensor)]


class Strangers(TorchFunctionMode):
    """Refuses tensors that need gradients and are neither inputs nor parameters: in a graph they are constants.

    Args:
        root: the traced module.
        tensors: its inputs.
    """

    def __init__(self, root: nn.Module, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._expected = {id(tensor): tensor for tensor in (*root.parameters(), *tensors)}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        current = opaque.active()
        if func == _GRAD_FN and current is not None and not current.inside:
            raise Lost("what its code does with the grad_fn of a tensor, such as a hook on it,")
        if current is not None and not current.inside and func not in _QUESTIONS:
            for tensor in tensors_in((args, kwargs)):
                if tensor.requires_grad and id(tensor) not in self._expected:
                    raise Lost(
                        "the gradient of a tensor that is neither an argument nor a parameter of its modules"
                    )
        output = func(*args, **(kwargs or {}))
        self._expected.update((id(one), one) for one in tensors_in(output) if one.requires_grad)
        return output


_GRAD_FN = torch.Tensor.grad_fn.__get__
# Ask about a tensor, and compute nothing with it.
_QUESTIONS = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("requires_grad", "shape", "dtype", "device", "is_meta", "ndim")
)
