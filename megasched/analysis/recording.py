"""One forward, call by call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megasched.analysis.loss_trial import LossLabels
from megasched.analysis.meta_call import call_hooks, loss_function_of, run_on_meta, sum_of_logits
from megasched.analysis.noted import NotedLines, Noting
from megasched.analysis.shape import SIZES
from megasched.analysis.surroundings import Surroundings
from megasched.definition.objectives import objective_of
from megasched.errors import ScheduleError


@dataclass
class ModuleCallRecord:
    """One call of a module: what it was handed, what it returned, and how many calls there were by then."""

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    end: int = -1


class Enough(BaseException):
    """Ends a trial call early. No error, so nothing that catches errors may catch it."""


def record(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    limit: int | None = None,
    noted: NotedLines | None = None,
) -> list[ModuleCallRecord]:
    """Every module call of one forward, in order; holds the tensors, so that identities stay comparable.

    Args:
        limit: the forward ends after this many calls.
        noted: gets the lines of the code.

    Raises:
        ScheduleError: it does not run on meta, or changes what is around the modules that it calls.
    """
    calls: list[ModuleCallRecord] = []
    surroundings = Surroundings(model)
    open_calls: list[ModuleCallRecord] = []
    running: list[str] = []
    mode = None
    if noted is not None:
        noted.note_model(model, dict(inputs))
        mode = Noting(noted, running)

    def before(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if len(calls) == limit:
            raise Enough
        surroundings.check(path, module)
        call = ModuleCallRecord(path, args, kwargs)
        calls.append(call)
        open_calls.append(call)
        running.append(path)

    def after(path: str, module: nn.Module, output: Any) -> None:
        running.pop()
        call = open_calls.pop()
        call.output = output
        call.end = len(calls)

    with suppress(Enough), call_hooks(model, before, after):
        run_on_meta(model, inputs, mode)
    if noted is not None:
        noted.let_go()
    return calls


def note_forward(model: nn.Module, inputs: Mapping[str, Any]) -> NotedLines:
    """What a forward notes, and what it does with the loss that ``loss_function`` gives.

    Args:
        model: a ``meta_copy``.

    Raises:
        ScheduleError: it does not run on meta with these arguments.
    """
    noted, running = NotedLines(), list[str]()
    noted.note_model(model, dict(inputs))

    def before(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        running.append(path)

    def after(path: str, module: nn.Module, output: Any) -> None:
        running.pop()

    with loss_given(model, calls_loss=True), call_hooks(model, before, after):
        run_on_meta(model, inputs, Noting(noted, running))
    noted.let_go()
    return noted


def record_with_loss(model: nn.Module) -> tuple[list[ModuleCallRecord], bool, NotedLines]:
    """The calls up to the loss, whether the forward hands all logits, and the labels as it got them, to
    ``loss_function``, and what the run noted."""
    called, noted = [], NotedLines()
    inputs = trial_of(model)

    def loss(logits: torch.Tensor, labels: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        called.append(logits.shape[:-1] == SIZES[0] and labels is inputs["labels"])
        logits.sum()  # the line that calls it is one that has operations done
        raise Enough

    calls: list[ModuleCallRecord] = []
    # A loss of its own may not take labels as long as these.
    with loss_function_of(model, loss), suppress(ScheduleError):
        calls = record(model, inputs, noted=noted)
    if called == [True]:
        return calls, True, noted
    noted = NotedLines()
    return record(model, inputs_of(model, *SIZES[0]), noted=noted), False, noted


def trial_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """A batch of a trial, with labels."""
    return objective_of(model).trial(getattr(model, "config", None), *SIZES[0])


def inputs_of(
    model: nn.Module, batch: int, length: int, labels: LossLabels | None = None, *, calls_loss: bool = False
) -> dict[str, torch.Tensor]:
    """A batch, with such labels as the definition's own code takes; and as they are for ``calls_loss``."""
    inputs = objective_of(model).trial(getattr(model, "config", None), batch, length)
    if calls_loss:
        return inputs
    given = inputs.pop("labels")
    return inputs if labels is None else inputs | labels.arguments(given)


@contextmanager
def loss_given(model: Any, *, calls_loss: bool) -> Iterator[None]:
    """In which ``loss_function`` gives any number, where a run has another one for it: what is done around it is
    looked at."""
    with loss_function_of(model, sum_of_logits) if calls_loss else nullcontext():
        yield
