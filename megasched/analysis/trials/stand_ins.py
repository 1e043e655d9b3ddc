"""Checks whether a definition's code sees that a run replaces its modules and parameters.

A run works on a copy of a definition. There, linears and embeddings that are cut are modules of other classes, and
all parameters are other tensors, of which a rank may have a smaller one. Code that calls a module by its name does
not notice. Code does that holds one elsewhere (in a list, a closure, a global), looks something up by one, asks
for a class, or reads the size of a weight.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Thread
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from megasched.analysis.recording.meta_call import call_hooks, meta_copy, run_on_meta, tensors_in, to_meta
from megasched.analysis.recording.stock import all_stock
from megasched.analysis.trials.later_calls import Done, differing, traced_call
from megasched.analysis.trials.object_keys import table_of_objects
from megasched.analysis.trials.process_asked import process_not_asked
from megasched.definition.linears import plain_attributes
from megasched.definition.module_copy import transfer_hooks
from megasched.definition.undisturbed import undisturbed
from megasched.errors import Problem, ScheduleError

_FILLED = ("_parameters", "_buffers", "_modules")
_REMEDY = "have the code reach its modules and parameters by the names of attributes, and not go by their classes"


# Identity of a tensor -> the problem with code that reads it, and itself, as no other may get that identity.
type _Gone = dict[int, tuple[Problem, torch.Tensor]]
# What a call has done; or the problem with code that does what no trial can follow.
type Trace = list[Done] | Problem


def trace_unaltered(model: nn.Module, inputs: Mapping[str, Any]) -> Trace:
    """Returns what a call of the model does whose modules and parameters are its own, to be compared with.

    Args:
        inputs: arguments of its forward in a trial.
    """
    probe = meta_copy(model)
    return _traced(probe, to_meta(dict(inputs)), _names(model) | _without_values(probe))


def why_seen(
    model: nn.Module,
    inputs: Mapping[str, Any],
    unaltered: Callable[[], Trace],
    replaced: Iterable[str],
    *,
    regions: bool,
) -> Problem | None:
    """Returns the problem with code that does something else where stand-ins replace its modules, or None.

    Args:
        inputs: arguments of its forward in a trial.
        unaltered: returns the result of ``trace_unaltered``.
        replaced: paths of the linears and embeddings that are other modules in a run.
        regions: whether a module's call may begin and end a region, as a call nested inside of it would, too.
    """
    if all_stock(model):  # whose code is known
        return None
    if (table := table_of_objects(model)) is not None:
        name, path = table
        what = f"its code looks up a module or a parameter in {name}, and a run has others"
        return Problem(what, path, remedy="keep what is looked up on the module, as an attribute")
    first = unaltered()
    if isinstance(first, Problem):
        return first
    inputs = to_meta(dict(inputs))
    if regions and (problem := _why_not_in_turn(meta_copy(model), inputs)) is not None:
        return problem
    probe = meta_copy(model)
    gone = _names(model) | _names(probe)
    put_stand_ins(probe, {path: {} for path in replaced})
    return _compared(first, probe, inputs, gone)


def sizes_read(
    model: nn.Module,
    inputs: Mapping[str, Any],
    unaltered: Callable[[], Trace],
    shapes: Mapping[str, Mapping[str, tuple[int, ...]]],
) -> set[str]:
    """Returns the paths of linears and embeddings whose weight's size other code reads and depends on.

    Args:
        inputs: arguments of its forward in a trial.
        unaltered: returns the result of ``trace_unaltered``; where that is a problem, ``why_seen`` has it.
        shapes: path -> name of a parameter -> its shape on a rank.
    """
    if all_stock(model) or not shapes:
        return set()
    first = unaltered()
    if isinstance(first, Problem):
        return set()
    probe = meta_copy(model)
    put_stand_ins(probe, shapes)
    read = _SizesRead(
        {id(p): path for path in shapes for p in probe.get_submodule(path).parameters(recurse=False)}
    )
    with read:
        problem = _compared(first, probe, to_meta(dict(inputs)), {}, own_code=shapes)
    return read.paths if problem is not None else set()


def _why_not_in_turn(probe: nn.Module, inputs: Mapping[str, Any]) -> Problem | None:
    """Returns the problem with a module that runs inside of its own call, or in threads; None if none does."""
    running: list[str] = []

    def before(path: str, *call: Any) -> None:
        if path in running:
            what = "it is called again inside of its own call, and a run may begin and end a region with each"
            remedy = "have a module of its own do what the inner call does, or call a function"
            raise ScheduleError(Problem(what, path, remedy=remedy))
        running.append(path)

    def after(*result: Any) -> None:
        running.pop()

    def in_a_thread(*args: Any, **kwargs: Any) -> Any:
        what = "its code runs in threads, where no trial sees what is done, nor do ranks do it in the same order"
        raise ScheduleError(Problem(what, running[-1], remedy="have it done in turn"))

    threads = patch.object(Thread, "start", in_a_thread), patch.object(ThreadPoolExecutor, "submit", in_a_thread)
    try:
        with threads[0], threads[1], call_hooks(probe, before, after):
            run_on_meta(probe, inputs)
    except ScheduleError as error:
        return error.problems[0]
    return None


def _compared(
    first: list[Done], probe: nn.Module, inputs: Mapping[str, Any], gone: _Gone, own_code: Container[str] = ()
) -> Problem | None:
    """Returns the first difference between two traced calls as a problem; None without one.

    Args:
        own_code: modules that have a smaller weight. Their own operations do not count, and neither do shapes,
            which differ where the weight itself is used.
    """
    second = _traced(probe, inputs, gone)
    if isinstance(second, Problem):
        return second
    if own_code:
        first, second = ([done[:-1] for done in run if done[0] not in own_code] for run in (first, second))
    path = differing(first, second)
    what = "its code does something else where other objects stand for its linears, embeddings and parameters, "
    return None if path is None else Problem(f"{what}as in a run", path, remedy=_REMEDY)


def _traced(probe: nn.Module, inputs: Mapping[str, Any], gone: _Gone) -> Trace:
    try:
        with undisturbed(probe), _Alterations(), process_not_asked():
            return traced_call(probe, inputs, partial(_refuse_gone, gone))
    except ScheduleError as error:
        return error.problems[0]


def _refuse_gone(gone: _Gone, tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        if id(tensor) in gone:
            problem, _ = gone[id(tensor)]
            raise ScheduleError(problem)


class _Alterations(TorchFunctionMode):
    """Refuses changes to a parameter that are no operations: a run relies on what it noted of it before."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ALTERING and isinstance(args[0], nn.Parameter):
            what = f"its forward sets {_ALTERING[func]} of a parameter"
            remedy = "leave parameters as they are: detach what is made of one, or compute with another tensor"
            raise ScheduleError(Problem(what, remedy=remedy))
        return func(*args, **(kwargs or {}))


_ALTERING = {
    torch.Tensor.requires_grad_: "requires_grad",
    torch.Tensor.requires_grad.__set__: "requires_grad",  # type: ignore[attr-defined]
    torch.Tensor.data.__set__: "the data",  # type: ignore[attr-defined]
    torch.Tensor.set_: "the data",
}


class _SizesRead(TorchFunctionMode):
    """Notes the parameters on which any function of torch is called.

    Args:
        paths_of: id of a parameter -> path of its module.
    """

    def __init__(self, paths_of: Mapping[int, str]) -> None:
        super().__init__()
        self._paths_of = paths_of
        self.paths: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.paths.update(self._paths_of[id(arg)] for arg in args[:1] if id(arg) in self._paths_of)
        return func(*args, **(kwargs or {}))


def _names(model: nn.Module) -> _Gone:
    gone: _Gone = {}
    for name, parameter in model.named_parameters():
        what = f"its code holds {name} elsewhere than at its name, and a run has another tensor there"
        gone[id(parameter)] = Problem(what, name.rpartition(".")[0], remedy=_REMEDY), parameter
    return gone


def _without_values(probe: nn.Module) -> _Gone:
    """Returns the tensors in attributes of a model, before it runs, that are on meta and stay there."""
    filled = {id(tensor) for tensor in (*probe.parameters(), *probe.buffers())}
    gone: _Gone = {}
    for path, module in probe.named_modules():
        held = {name: value for name, value in vars(module).items() if name not in _FILLED}
        for name, value in held.items():
            what = f"its code reads {name}, a tensor that its class makes of weights, which have no values then"
            remedy = "make it in the forward, or of no weights; one above 1 GiB is always made without values"
            for tensor in tensors_in(value):
                if tensor.is_meta and id(tensor) not in filled:
                    gone[id(tensor)] = Problem(what, path, remedy=remedy), tensor
    return gone


class StandIn(nn.Module):
    """Stands in for a module: it computes the same, but is not of its class.

    Args:
        module: the module, whose parameters nobody else holds.
        shapes: name of a parameter -> the shape that other code sees.
    """

    def __init__(self, module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        inner = copy.copy(module)
        inner.__dict__ = {**vars(module), "_parameters": dict(module._parameters)}
        for name, parameter in module._parameters.items():
            seen = parameter
            if parameter is not None and name in shapes:
                seen = nn.Parameter(parameter.new_empty(shapes[name]), requires_grad=parameter.requires_grad)
            self._parameters[name] = seen
        self._buffers.update(module._buffers)  # of a batch norm
        for name, child in module.named_children():  # of an adapter
            self.add_module(name, child)
        vars(self).update(plain_attributes(module))
        transfer_hooks(module, self)
        self.computed = inner.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.computed(*args, **kwargs)


def put_stand_ins(probe: nn.Module, shapes: Mapping[str, Mapping[str, tuple[int, ...]]]) -> None:
    """Replaces all parameters of a ``meta_copy`` by other tensors, and modules at these paths by stand-ins.

    Args:
        shapes: path of such a module -> name of a parameter -> the shape that other code sees; by default its own.
    """
    new = {
        id(old): nn.Parameter(torch.empty_like(old), requires_grad=old.requires_grad) for old in probe.parameters()
    }
    before = {module: dict(module._parameters) for module in probe.modules()}
    for module, held in before.items():
        module._parameters.update({name: new[id(old)] for name, old in held.items() if old is not None})
    by_module: dict[nn.Module, StandIn] = {}
    for path, sizes in shapes.items():
        module = probe.get_submodule(path)
        if module not in by_module:
            by_module[module] = StandIn(module, sizes)
            module._parameters.update(before[module])
            module.register_forward_pre_hook(partial(_refuse_call, path))
    for parent in [*probe.modules(), *by_module.values()]:
        for name, child in parent._modules.items():
            if child in by_module:
                parent._modules[name] = by_module[child]


def _refuse_call(path: str, module: nn.Module, args: Any) -> None:
    what = "it is called by code that holds it elsewhere than at its name, and a run has another module there"
    raise ScheduleError(Problem(what, path, remedy=_REMEDY))
