"""Finds the answers with which a definition's own checks of values let a trial go on.

A trial has no values. Code such as ``if not (input_ids < size).all(): raise ValueError`` fails in it, but not in a
run, whose values are as they must be.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from megasched.analysis.recording.meta_call import PASSED, ScalarAnswers, call_hooks, meta_copy, run_on_meta
from megasched.analysis.recording.sites import Line, raising_line, running_lines
from megasched.errors import ScheduleError

# Of one definition: each takes a run.
_MOST = 100


class _Question(NamedTuple):
    """Represents a question: the lines that ask, and what tells the module that runs them from others."""

    lines: tuple[Line, ...]
    state: tuple[Any, ...]


@dataclass
class _Failure:
    """Describes a forward that failed.

    Attributes:
        line: the line that raised the error, or what it called.
        asked: questions of its function, or of what that called, in order.
    """

    line: Line | None
    asked: list[_Question] = field(default_factory=list)


def pass_checks(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Finds the checks of values by which a forward fails; all trials pass them from now on.

    A check is a question that ends in an error wherever the same code asks it and is answered with 0 or False.

    Args:
        model: the definition, or a copy; it stays as it is.
        inputs: arguments of its forward, on meta.

    Returns:
        Whether the forward goes through by new answers.
    """
    checks: set[tuple[Line, ...]] = set()
    failure = _failure(_Questions(model, inputs, checks))
    while failure is not None:
        for lines in dict.fromkeys(question.lines for question in reversed(failure.asked)):
            after = None if lines in checks else _Questions(model, inputs, {*checks, lines})
            if after is not None and ((failed := _failure(after)) is None or failed.line != failure.line):
                checks.add(lines)
                failure = failed
                break
        else:
            return False
    if not checks or not _always_fail(model, inputs, checks):
        return False
    PASSED.update(checks)
    return True


def _always_fail(model: nn.Module, inputs: Mapping[str, Any], checks: Set[tuple[Line, ...]]) -> bool:
    """Returns whether each module fails that asks one of these questions and gets the usual answer."""
    whole = _Questions(model, inputs, checks)
    _failure(whole)
    asked = {question for question in whole.asked if question.lines in checks}
    return len(asked) <= _MOST and all(
        _failure(_Questions(model, inputs, checks, usual=question)) is not None for question in asked
    )


class _Questions(ScalarAnswers):
    """Notes each question about values of a forward.

    Args:
        checks: lines of questions that are passed.
        usual: one of these that gets the usual answer.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        checks: Set[tuple[Line, ...]],
        usual: _Question | None = None,
    ) -> None:
        super().__init__()
        self.model, self.inputs = meta_copy(model), inputs
        self.checks, self.usual = checks, usual
        self.asked: list[_Question] = []
        self.running = [self.model]  # before its own call, too, in hooks that were there first

    def passes(self) -> bool:
        question = _Question(running_lines(), state_of(self.running[-1]))
        self.asked.append(question)
        return super().passes() or (question.lines in self.checks and question != self.usual)


def _failure(run: _Questions) -> _Failure | None:
    def before(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        run.running.append(module)

    def after(path: str, module: nn.Module, output: Any) -> None:
        run.running.pop()

    try:
        with call_hooks(run.model, before, after):
            run_on_meta(run.model, run.inputs, run)
    except ScheduleError as error:
        line = raising_line(error.__cause__ or error)
        codes = [{identity for identity, _ in question.lines} for question in run.asked]
        asked = [one for one, of in zip(run.asked, codes, strict=True) if line is not None and line[0] in of]
        return _Failure(line, asked)
    return None


def state_of(module: nn.Module) -> tuple[Any, ...]:
    """Returns the class, numbers and names that code may read off a module."""
    plain = {name: value for name, value in vars(module).items() if isinstance(value, bool | int | float | str)}
    return type(module), tuple(sorted(plain.items()))
