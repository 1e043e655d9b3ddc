"""Finds the ways through a definition's code, which values, the length of a sequence and evaluation decide.

A trial on meta has no values and is short. It goes one way. Where the code asks for a value, or for the length, a
run may go another, with operations that no trial has met. So the code runs with other answers, and on sequences as
long as those of a run, and as an evaluation runs it. Every way that differs is one more to be analysed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from megasched.analysis.notes.code_facts import CodeFacts, Numbers
from megasched.analysis.recording.meta_call import (
    ScalarAnswers,
    call_hooks,
    evaluating,
    meta_copy,
    run_on_meta,
)
from megasched.analysis.recording.numbers import numbers_in
from megasched.analysis.recording.sites import Site, running_lines
from megasched.analysis.recording.tape import Operation
from megasched.analysis.stages.hooked_outputs import LeafPath
from megasched.definition import attention_interface
from megasched.errors import ScheduleError

# Larger than what code compares with, as a rule.
_LARGE = 10_000
# The shortest sequence of an analysis at another length than a trial's.
_SHORTEST = 16
# No definition has so many; looking at each way takes a run.
_MOST = 24
# A loop whose end is a value may go on for very long with another one.
_LONGER = 8

type Inputs = Mapping[str, Any]
# Arguments of a forward, on meta, with sequences of this length.
type InputsOf = Callable[[int], Inputs]
type Gathered = Mapping[str, Collection[LeafPath]]


@dataclass(frozen=True)
class Way:
    """Describes the answers and the length that make the code go one way.

    Attributes:
        answers: answers to questions about values; ``ScalarAnswers`` answers the others.
        length: length of a sequence; None for that of a trial.
        evaluates: whether the model is in evaluation mode.
    """

    answers: tuple[tuple[Site, int], ...] = ()
    length: int | None = None
    evaluates: bool = False

    def __str__(self) -> str:
        places = ", ".join(str(site) for site, _ in self.answers)
        if places:
            return f"the value that {places} asks for"
        return "whether it trains or evaluates" if self.evaluates else "the length of the sequence"


TRIAL = Way()


@dataclass(frozen=True)
class Ways:
    """Holds the ways that were found.

    Attributes:
        others: ways beside that of a trial.
        deciding: questions whose answers change the operations that run, their shapes or their numbers.
        too_many: questions with more ways than were looked at.
    """

    others: tuple[Way, ...] = ()
    deciding: frozenset[Site] = frozenset()
    too_many: tuple[Site, ...] = ()


NO_OTHERS = Ways()


def find_ways(
    model: nn.Module, short: Inputs, inputs_of: InputsOf | None = None, length: int | None = None
) -> Ways:
    """Runs a model with other answers to its questions, on longer sequences and in evaluation; returns its ways.

    Args:
        model: the definition; what runs are copies on meta, each but once, as a forward may change its modules.
        short: arguments of its forward in a trial, on meta.
        inputs_of: makes such arguments for another length.
        length: length of a run's sequences, where that is known.

    Raises:
        ScheduleError: it does not run on meta.
    """
    search = _Search(model, short, inputs_of)
    if length is not None and inputs_of is not None:
        search.look_at_length(length)
    search.look_at_evaluation()
    search.look_at_answers()
    return Ways(tuple(search.others), frozenset(search.deciding), tuple(sorted(search.too_many)))


def evaluates_otherwise(model: nn.Module, inputs: Inputs) -> bool:
    """Returns whether an evaluation runs other operations, or other lines, than training without dropouts.

    Where it does not run on meta at all, nothing can be said of it, and that is no reason not to train.

    Args:
        model: the definition.
        inputs: arguments of its forward in a trial, on meta.
    """
    runs = []
    for evaluates in (False, True):
        with suppress(ScheduleError), _NoDropout(), evaluating(evaluates):
            runs.append(_WayRun(meta_copy(model), inputs, Way()).done)
    return len(runs) == 2 and runs[0] != runs[1]


class _NoDropout(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func in _DROPOUTS else func(*args, **(kwargs or {}))


# torch's own, and the functions around them, which a mode sees first.
_DROPOUTS = frozenset(
    getattr(module, name)
    for module, names in (
        (torch, "dropout feature_dropout alpha_dropout feature_alpha_dropout"),
        (nn.functional, "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout"),
    )
    for name in names.split()
)


class _Search:
    def __init__(self, model: nn.Module, short: Inputs, inputs_of: InputsOf | None) -> None:
        self.model, self.short, self.inputs_of = model, short, inputs_of
        first = _WayRun(meta_copy(model), short, Way())
        self.others: list[Way] = []
        self.deciding, self.too_many = set[Site](), set[Site]()
        self.met = set(first.code_facts.lines)
        self.seen = {frozenset(first.code_facts.lines)}
        self.waiting = [(Way(), first)]
        self.looked = 0

    def look_at_length(self, length: int) -> None:
        """Adds a way if a sequence of this length runs other lines, at the shortest tried length that does."""
        try:
            whole = self._run(Way(length=length))
        except ScheduleError:  # more than it has positions for, which a run will say
            return
        if whole.code_facts.lines == self.met:
            return
        shorter = _SHORTEST
        while shorter < length:
            with suppress(ScheduleError):
                run = self._run(Way(length=shorter))
                if whole.code_facts.lines == run.code_facts.lines:
                    length, whole = shorter, run
                    break
            shorter *= 2
        self._found(Way(length=length), whole)

    def look_at_evaluation(self) -> None:
        """Adds a way if an evaluation computes otherwise."""
        if evaluates_otherwise(self.model, self.short):
            way = Way(evaluates=True)
            run = self._run(way)
            self.met |= set(run.code_facts.lines)
            self.others.append(way)
            self.waiting.append((way, run))

    def look_at_answers(self) -> None:
        """Tries other answers to every question of every way."""
        while self.waiting:
            way, base = self.waiting.pop(0)
            for site, kinds in base.code_facts.asked.items():
                for answer in _answers(kinds) if site not in dict(way.answers) else ():
                    other = Way((*way.answers, (site, answer)), way.length, way.evaluates)
                    self._look_at(other, base, of_count=kinds == {None})

    def _look_at(self, way: Way, base: _WayRun, *, of_count: bool) -> None:
        site, _ = way.answers[-1]
        if self.looked == _MOST:
            self.too_many.add(site)
            return
        self.looked += 1
        try:
            run = self._run(way, _LONGER * len(base.done) + 1000)
        except ScheduleError:  # a check that fails, or what is no value there
            return
        if (of_count or run.too_long) and run.code_facts.lines <= self.met:  # shapes are others, of course
            return
        if run.too_long:
            self.too_many.add(site)
            return
        if run.done != base.done:
            self.deciding.add(site)
            self._found(way, run)

    def _run(self, way: Way, longest: int | None = None) -> _WayRun:
        inputs = self.short if way.length is None or self.inputs_of is None else self.inputs_of(way.length)
        with evaluating(way.evaluates):
            return _WayRun(meta_copy(self.model), inputs, way, longest)

    def _found(self, way: Way, run: _WayRun) -> None:
        lines = frozenset(run.code_facts.lines)
        if lines not in self.seen:
            self.seen.add(lines)
            self.met |= lines
            self.others.append(way)
            self.waiting.append((way, run))


def _answers(kinds: Collection[torch.dtype | None]) -> tuple[int, ...]:
    """Returns the unusual answers to a question: to how many there are, for a truth value, and for a number."""
    if None in kinds:
        return (0, 2)
    return (1,) if set(kinds) == {torch.bool} else (1, _LARGE, -_LARGE)


def what_goes_by_length(
    one: Iterable[Numbers],
    other: Iterable[Numbers],
    is_whole: Callable[[str], bool] = lambda path: False,
    *,
    is_outside: Callable[[str], bool] = lambda path: False,
    places: bool = True,
) -> tuple[str, str] | None:
    """Returns module and operation of the first difference between runs of a part of a sequence and of the whole.

    Args:
        one, other: the numbers that the two runs noted.
        is_whole: whether the module at a path gets the whole sequence in any case.
        is_outside: whether the module is outside of the layers. Before and after all inside code it gets the whole
            sequence. Between inside code it has a part, and places that it counts are none of its tensors'.
        places: whether tensors made of nothing, such as counted places, are looked at, too.
    """
    whole, outside = cache(is_whole), cache(is_outside)

    def looked_at(numbers: Iterable[Numbers]) -> list[Numbers]:
        numbers = list(numbers)
        inside = [index for index, done in enumerate(numbers) if not outside(done.path)]
        return [
            done
            for done in (numbers[inside[0] : inside[-1] + 1] if inside else [])
            if not whole(done.path) and (not done.of_nothing or (places and (done.here or not outside(done.path))))
        ]

    for found in zip_longest(looked_at(one), looked_at(other)):
        if found[0] != found[1]:
            either = found[0] or found[1]
            return either.path, either.operation
    return None


def numbers_at(model: nn.Module, inputs: Inputs, gathered: Gathered = MappingProxyType({})) -> list[Numbers]:
    """Returns the numbers that a run of a definition notes.

    Args:
        gathered: module -> leaves of its output that are whole in any case, and are left aside.

    Raises:
        ScheduleError: it does not run on meta with these arguments.
    """
    return _WayRun(meta_copy(model), inputs, Way(), gathered=gathered).code_facts.numbers


class _TooManyOperations(BaseException):
    """Ends a run; as a ``BaseException``, so that no handler of errors catches it."""


class _WayRun(ScalarAnswers):
    """Runs a forward, without the operations inside of attention through HF's registry.

    No tape tells: each run has other answers or another length, and most are compared line by line and forgotten.

    Attributes:
        code_facts: its lines, its numbers and its questions.
        done: module, lines, name, numbers and output shapes of each operation; of a tensor made of numbers, those.
        too_long: whether it was ended early.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        way: Way,
        longest: int | None = None,
        gathered: Gathered = MappingProxyType({}),
    ) -> None:
        super().__init__(answers=dict(way.answers))
        self.gathered = gathered
        self.code_facts = CodeFacts()
        self.code_facts.note_model(model, dict(inputs))
        self.done: list[tuple[str, Any, Any, tuple[float, ...], Any]] = []
        self.longest = longest
        self.stack: list[str] = [""]
        self.too_long = False
        try:
            with attention_interface.use_attention(self.attend), call_hooks(model, self.before, self.after):
                run_on_meta(model, inputs, self)
        except _TooManyOperations:
            self.too_long = True
        self.code_facts.let_go()

    def before(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.stack.append(path)

    def after(self, path: str, module: nn.Module, output: Any) -> None:
        self.stack.pop()
        if path in self.gathered:
            leaves, _ = torch.utils._pytree.tree_flatten_with_path(output)
            self.code_facts.leave_aside(leaf for place, leaf in leaves if place in self.gathered[path])

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: Any, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Stands in for attention: takes q, k, v [b, heads, s, d], and returns [b, s, heads, d]."""
        batch, heads, length, _ = query.shape
        return value.new_empty(batch, length, heads, value.shape[-1]), None

    def asked_about_values(self, tensors: Any, site: Site | None, *, how_many: bool) -> None:
        self.code_facts.note_question(tensors, site, how_many=how_many)

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = super().execute(func, args, kwargs)
        path = self.stack[-1]
        operation = Operation.done(func, args, kwargs, output, running_lines())
        lines = operation.lines if self.code_facts.note(path, operation) else None
        shapes = tuple(tuple(tensor.shape) for tensor in operation.outputs)
        self.done.append((path, lines, func, tuple(numbers_in(args, kwargs)), shapes))
        if len(self.done) == self.longest:
            raise _TooManyOperations
        return output

    def numbers_given(self, values: Any) -> None:
        self.done.append((self.stack[-1], None, None, (), repr(values)))
        self.code_facts.note_given(self.stack[-1], values)
