"""Finds what a traced module's code does beside returning a result, which its graph would not do again."""

from __future__ import annotations

from collections.abc import Iterable
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

_TRAINS = ("training", "use_input_stats")  # arguments of kernels that then write to these, as no schema says:
_STATISTICS = ("running_mean", "running_var")


class Unfit(Exception):
    """Reports code that does more than a graph would do.

    Attributes:
        module: path of the module whose code it is, from the traced one.
        remedy: a remedy other than keeping the module a call, or empty.
    """

    def __init__(self, what: str, module: str = "", remedy: str = "") -> None:
        self.module, self.remedy = module, remedy
        super().__init__(what)


def refuse_changes(before: RestorableState, root: nn.Module, *, trial: bool) -> None:
    """Refuses code that has changed what it keeps in Python since ``before``.

    Args:
        trial: whether ``before`` holds what is outside of modules.

    Raises:
        Unfit: it has.
    """
    names = before.changed(RestorableState(root, values=False, outside=trial))
    if names:
        # What is in a container, and how long that is, are names of their own.
        names = [name for name in names if not name.startswith("len(")] or names
        homes = [path for path, _ in root.named_modules() if path and names[0].startswith(f"{path}.")]
        what = f"its code changes {_listed(names)}, which it keeps between calls and a graph would not"
        raise Unfit(what, max(homes, key=len, default=""))


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
    after, held = opaque.TensorTree.take(now)
    same = [list(map(id, one)) for one in (held, after.leaves)] == [
        list(map(id, one)) for one in (tensors, call.leaves)
    ]
    if after.spec != call.spec or not same:
        raise Unfit("its code changes a list or dictionary that it is handed, and a graph would not")


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
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta.get("val"))
                tensors = [*written(node.target, args, kwargs), *_statistics(node.target, args, kwargs)]
                found |= {known[at]: None for at in map(storage_of, tensors) if at in known}
    if found:
        owner = min(found).rpartition(".")[0]
        is_module = any(path == owner for path, _ in root.named_modules())
        raise Unfit(f"it writes to {', '.join(sorted(found))} in its forward", owner if is_module else "")


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
        if current is not None and not current.inside and func not in _QUESTIONS:
            for tensor in tensors_in((args, kwargs)):
                if tensor.requires_grad and id(tensor) not in self._expected:
                    raise Lost(
                        "the gradient of a tensor that is neither an argument nor a parameter of its modules"
                    )
        output = func(*args, **(kwargs or {}))
        self._expected.update((id(one), one) for one in tensors_in(output) if one.requires_grad)
        return output


# Ask about a tensor, and compute nothing with it.
_QUESTIONS = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("requires_grad", "shape", "dtype", "device", "is_meta", "ndim")
)
