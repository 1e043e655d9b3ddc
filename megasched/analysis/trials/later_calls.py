"""Checks whether a definition's later calls do what its first call does, which is the one that a plan looks at.

Code may count its calls, or keep a flag, a list or a random generator, and depend on it: a warm-up, values that
are taken from the first batch, layers that are skipped every second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from megasched.analysis.notes.code_facts import CodeFacts
from megasched.analysis.notes.python_state import State
from megasched.analysis.recording.meta_call import (
    ScalarAnswers,
    call_hooks,
    meta_copy,
    run_on_meta,
    tensors_in,
    to_meta,
)
from megasched.analysis.recording.numbers import numbers_in
from megasched.analysis.recording.sites import running_lines
from megasched.analysis.recording.stock import all_stock
from megasched.analysis.recording.tape import Operation
from megasched.definition.undisturbed import undisturbed
from megasched.errors import Problem, ScheduleError

_CALLS = 4
# How far counters are put forward then: past what code compares them with, as a rule.
_FAR = (9_999, 1_000_003)
_REMEDY = "run it at one rank, or have the code do the same in every call"

type Done = tuple[Any, ...]
type Check = Callable[[list[torch.Tensor]], None]


def why_calls_differ(model: nn.Module, inputs: Mapping[str, Any]) -> Problem | None:
    """Returns the problem with later calls that do, or may do, something else than the first; None if none.

    Args:
        inputs: arguments of its forward in a trial.

    Raises:
        ScheduleError: the model does not run on meta.
    """
    if all_stock(model):  # of which none does so
        return None
    inputs = to_meta(dict(inputs))
    changed, generators = _traces(meta_copy(model), inputs)
    for name in changed:
        if name in generators:
            what = f"it draws numbers from a generator of its own ({name}), of which each rank has another one"
            return Problem(what, _path(name, model), remedy=_REMEDY)
    path = _other_in_a_later_call(meta_copy(model), inputs) if changed else None
    if path is None:
        return None
    names = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
    what = f"what its code does goes by which call it is: it changes {names} from call to call"
    return Problem(what, path, remedy=_REMEDY)


def _traces(probe: nn.Module, inputs: Mapping[str, Any]) -> tuple[list[str], set[str]]:
    """Returns the names of state that a call changes, and those of generators and counters."""
    with undisturbed(probe):
        before = State(probe)
        with call_hooks(probe, around=lambda path, module: not path):
            run_on_meta(probe, inputs, leaves_traces=True)
        after = State(probe)
        return before.changed(after), after.generators


def _other_in_a_later_call(probe: nn.Module, inputs: Mapping[str, Any]) -> str | None:
    """Returns the path of a module whose later call differs from its first one; None if no module's does."""
    with undisturbed(probe):
        first = traced_call(probe, inputs)
        for _ in _later(probe):
            try:
                later = traced_call(probe, inputs)
            except ScheduleError as error:
                return error.problems[0].module
            if (path := differing(first, later)) is not None:
                return path
    return None


def _later(probe: nn.Module) -> Iterator[None]:
    """Yields before each of some later calls, and before the last ones advances the numbers that change."""
    before = now = State(probe)
    for _ in range(_CALLS):
        yield
        before, now = now, State(probe)
    counters = [now.spots[name] for name in before.changed(now) if name in now.spots]
    for far in _FAR if counters else ():
        for counter in counters:
            counter.add(far)
        yield


class CallTrace(ScalarAnswers):
    """Runs a forward, and lists its operations.

    No tape tells: what code keeps from call to call shows in later calls of the same model alone.

    Args:
        check: called with the tensors that an operation takes, before it is done.

    Attributes:
        done: module, lines of the code, operation, numbers and shapes of each operation on the model's tensors.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any], check: Check = lambda tensors: None) -> None:
        super().__init__()
        self._check = check
        self.done: list[Done] = []
        self._running: list[str] = []
        self._noted = CodeFacts()
        self._noted.note_model(model, inputs)

    def before(self, path: str, *call: Any) -> None:
        self._running.append(path)

    def after(self, *result: Any) -> None:
        self._running.pop()

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check(tensors_in((args, kwargs)))
        output = super().execute(func, args, kwargs)
        path = self._running[-1] if self._running else ""
        operation = Operation.done(func, args, kwargs, output, running_lines())
        if self._noted.note(path, operation):
            shapes = tuple(tuple(tensor.shape) for tensor in operation.outputs)
            self.done.append((path, operation.lines, func, tuple(numbers_in(args, kwargs)), shapes))
        return output


def traced_call(probe: nn.Module, inputs: Mapping[str, Any], check: Check = lambda tensors: None) -> list[Done]:
    """Returns the operations of one call of a ``meta_copy``; what its code stores outside of modules stays."""
    run = CallTrace(probe, inputs, check)
    with call_hooks(probe, run.before, run.after):
        run_on_meta(probe, inputs, run, leaves_traces=True)
    return run.done


def differing(first: list[Done], later: list[Done]) -> str | None:
    """Returns the path of a module that did something else, or None if none did.

    Paths are not compared: a call may replace modules by others, which have no path in it.
    """
    for one, other in zip_longest(first, later):
        if one is None or other is None or one[1:] != other[1:]:
            return str((other or one)[0])
    return None


def _path(name: str, probe: nn.Module) -> str:
    """Returns the path of the module whose attribute has a name; empty if it is no module's."""
    paths = [path for path, _ in probe.named_modules() if path and name.startswith(f"{path}.")]
    return max(paths, key=len, default="")
