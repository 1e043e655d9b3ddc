"""Notes which lines of a definition's code run, with which numbers, and which questions about values they ask."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from megasched.analysis.notes.made import MadeOfNothing
from megasched.analysis.recording.meta_call import tensors_in
from megasched.analysis.recording.numbers import CONSTANTS, numbers_in
from megasched.analysis.recording.sites import Line, Lines, Site
from megasched.analysis.recording.tape import Call, Operation, Question, Tape, TapeReader


class Numbers(NamedTuple):
    """Describes what an operation's result depends on beside its tensors.

    Attributes:
        path: the module whose code runs it.
        lines: lines of that code.
        operation: its name.
        numbers: the numbers it got; for a tensor made of nothing, a number that is equal for those made alike.
        of_nothing: whether it counts places, or a tensor made of nothing meets others.
        here: whether such a tensor meets others in the module that made it.
    """

    path: str
    lines: tuple[Line, ...]
    operation: str
    numbers: tuple[float, ...]
    of_nothing: bool = False
    here: bool = False


# Get numbers that are the sizes of what they take or give, or that say which part of it they take.
_OF_SIZES = frozenset(
    (
        *("slice", "select", "narrow", "as_strided", "view", "expand", "reshape", "alias", "detach"),
        *("empty", "new_empty", "new_zeros", "new_ones", "slice_scatter", "select_scatter"),
    )
)
_COPIES = frozenset(["clone", "_to_copy", "copy_"])  # made or not by how a tensor lies, which sizes of 1 decide
COUNTED = "arange"  # makes places, of nothing


@cache
def _kind(func: Any) -> tuple[str, str, bool, bool]:
    """Returns an operation's name, its full name with the overload, and two flags.

    They say whether its numbers are sizes, and whether it works on single elements.
    """
    name = func.__name__.partition(".")[0]
    pointwise = torch.Tag.pointwise in getattr(func, "tags", ()) and name not in _COPIES
    return name, func.__name__, name in _OF_SIZES, pointwise


class CodeFacts:
    """Holds which lines of a definition's code run operations, and which questions about values they ask.

    Tensors made of neither arguments nor weights, such as masks and positions, are left aside. Only how they were
    made is noted, where they meet the others.

    Attributes:
        lines: modules and the lines of their code.
        numbers: the numbers of operations beside sizes. Element-wise operations are there without numbers, too.
        asked: questions about values -> dtypes of the tensors; None for questions about how many there are.
    """

    def __init__(self) -> None:
        self.lines: set[Lines] = set()
        self.numbers: list[Numbers] = []
        self.asked: dict[Site, set[torch.dtype | None]] = {}
        self._data: dict[int, torch.Tensor] = {}  # held, so that no other tensor gets the id
        self._made = MadeOfNothing()

    def note_model(self, model: torch.nn.Module, inputs: Any) -> None:
        """Follows a model's parameters and buffers, and its inputs."""
        self.note_data([*model.parameters(), *model.buffers(), *tensors_in(inputs)])

    def note_data(self, tensors: Iterable[torch.Tensor]) -> None:
        """Follows these tensors, and tensors made of them."""
        self._data.update((id(tensor), tensor) for tensor in tensors)

    def leave_aside(self, tensors: Iterable[torch.Tensor]) -> None:
        """Stops following these tensors, and tensors made of them alone."""
        for tensor in tensors:
            self._data.pop(id(tensor), None)

    def let_go(self) -> None:
        """Drops all tensors; to be called after the run."""
        self._data.clear()
        self._made.let_go()

    def note(self, path: str, operation: Operation) -> bool:
        """Notes an operation in the module at ``path``, and returns whether it is of data, and not left aside."""
        name, full, of_sizes, pointwise = _kind(operation.func)
        ids = [id(tensor) for tensor in operation.operands]
        of_data = not self._data.keys().isdisjoint(ids)
        if name in CONSTANTS or not of_data or self._made.meets(ids):
            self._note_made(path, operation)
        if not of_data:
            if name == COUNTED:
                numbers = tuple(numbers_in(operation.args, operation.kwargs))
                self.numbers.append(Numbers(path, operation.lines, name, numbers, of_nothing=True))
            return False
        self.lines.add((path, operation.lines))
        numbers = () if of_sizes else tuple(numbers_in(operation.args, operation.kwargs))
        if numbers or pointwise:
            self.numbers.append(Numbers(path, operation.lines, full, numbers))
        self.note_data(operation.outputs)
        return True

    def _note_made(self, path: str, operation: Operation) -> None:
        """Notes an operation that makes a tensor of nothing, or gets one that was made so."""
        name, _, _, pointwise = _kind(operation.func)
        made = [self._made.of(tensor) for tensor in operation.operands]
        known = [one for one in made if one is not None]
        met = any(
            one is None and id(tensor) in self._data for tensor, one in zip(operation.operands, made, strict=True)
        )
        if name in CONSTANTS or not met:
            self._made.follow(path, name, known, operation, pointwise=pointwise)
            return
        for one in known:
            here = one.path == path
            told = (one.told,)
            self.numbers.append(Numbers(one.path, operation.lines, one.name, told, of_nothing=True, here=here))
        self._made.forget(operation.outputs)

    def note_given(self, path: str, values: Any) -> None:
        """Notes code that makes a tensor of numbers."""
        self.numbers.append(Numbers(path, (), "tensor", (hash(repr(values)),)))

    def note_question(self, tensors: Sequence[torch.Tensor], site: Site | None, *, how_many: bool) -> None:
        """Notes code that asks for values of tensors, or how many there are of a kind."""
        for tensor in tensors:
            if (made := self._made.of(tensor)) is not None:
                told = hash((made.told, tuple(tensor.shape)))
                self.numbers.append(Numbers(made.path, (), made.name, (told,), of_nothing=True))
        if site is not None and not self._data.keys().isdisjoint(map(id, tensors)):
            self.asked.setdefault(site, set()).update(None if how_many else tensor.dtype for tensor in tensors)


def code_facts_of(tape: Tape) -> CodeFacts:
    """Returns the facts of a forward, up to its loss and after it, from a tape with lines."""
    reader = _Noting(tape)
    tape.read(reader)
    reader.code_facts.let_go()
    return reader.code_facts


class _Noting(TapeReader):
    def __init__(self, tape: Tape) -> None:
        self.code_facts = CodeFacts()
        self.code_facts.note_model(tape.model, dict(tape.inputs))
        self.running = [""]

    def enter(self, call: Call) -> None:
        self.running.append(call.path)

    def leave(self, call: Call) -> None:
        self.running.pop()

    def question(self, question: Question) -> None:
        self.code_facts.note_question(question.tensors, question.site, how_many=question.how_many)

    def numbers_given(self, values: Any) -> None:
        self.code_facts.note_given(self.running[-1], values)

    def operation(self, operation: Operation) -> None:
        self.code_facts.note(self.running[-1], operation)
