"""Defines the tape, a record of one forward on the meta device that all analyses read.

A tape holds the tensors of the forward themselves, so that a tensor is known by its identity for as long as the
tape lives. An analysis is a ``TapeReader``: it gets the events in the order in which they happened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from megasched.analysis.recording.meta_call import tensors_in
from megasched.analysis.recording.sites import Line, Site

if TYPE_CHECKING:
    from megasched.analysis.recording.backward_code import Function


@dataclass(slots=True, eq=False)
class Operation:
    """Represents an operation that torch carried out.

    Attributes:
        func: the operator, as torch dispatches it.
        operands, outputs: the tensors in its arguments, and in its output.
        lines: lines of the definition's code that ran it; empty where the tape has no lines.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    operands: list[torch.Tensor]
    outputs: list[torch.Tensor]
    lines: tuple[Line, ...]

    @classmethod
    def done(
        cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, lines: tuple[Line, ...] = ()
    ) -> Operation:
        """Returns an operation with the tensors that are in its arguments and its output."""
        return cls(func, args, kwargs, output, tensors_in((args, kwargs)), tensors_in(output), lines)


class Alias(NamedTuple):
    """Pairs a tensor with the view of it that replaces it on its way into or out of a module."""

    source: torch.Tensor
    alias: torch.Tensor


@dataclass(slots=True, eq=False)
class Call:
    """Represents a call of a module.

    Attributes:
        args, kwargs: arguments of the forward; lists and mappings are copies, made when it began.
        output: return value of the forward.
        returned: ``output`` as the caller got it, with aliases in it.
        left: for a layer, ``args`` and ``kwargs`` at its end: it may have written to mappings among them.
        entered: the tensors among the caller's arguments that the forward got as aliases.
        exited: the tensors in ``output`` that the caller got as aliases.
        drew_before: whether Python's or numpy's random numbers were drawn since the module before it began or
            ended; False inside of a layer, which draws on one stage alone.
        drew_inside: whether they were drawn between the last start or end of a module and its own end.
        autograd: whether gradients were recorded when it was called.
        end: how many calls had begun when it ended; -1 until then.
    """

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    entered: Sequence[Alias]
    drew_before: bool
    autograd: bool
    output: Any = None
    returned: Any = None
    left: tuple[tuple[Any, ...], dict[str, Any]] = field(default_factory=lambda: ((), {}))
    exited: Sequence[Alias] = ()
    drew_inside: bool = False
    end: int = -1


@dataclass(slots=True, eq=False)
class RecordedAttention:
    """Represents a call of the attention function in transformers' registry.

    Attributes:
        query, key, value: [b, heads, s, d].
        args, kwargs: the other arguments, the mask first.
    """

    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None


@dataclass(slots=True, eq=False)
class RecordedLoss:
    """Represents a call of a definition's ``loss_function``, for which a function of all logits stands in."""

    logits: torch.Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None


@dataclass(slots=True, eq=False)
class Question:
    """Represents a question about values, which meta tensors lack, or about how many elements of a kind there are.

    Attributes:
        tensors: the tensors that the code asks about.
        site: the place in the definition's code; None where it was not the definition that asked.
    """

    tensors: Sequence[torch.Tensor]
    site: Site | None
    how_many: bool


class HeldTensor(NamedTuple):
    """Holds a parameter or buffer, with the storage and version it had before the forward."""

    tensor: torch.Tensor
    storage: int
    version: int


class TapeReader:
    """Receives the events of a tape; each method does nothing by default."""

    def operation(self, operation: Operation) -> None:
        """Handles an operation that torch carried out."""

    def enter(self, call: Call) -> None:
        """Handles the start of a module's forward, when its output is not known yet."""

    def leave(self, call: Call) -> None:
        """Handles the end of a module's forward."""

    def enter_attention(self, call: RecordedAttention) -> None:
        """Handles the start of the attention function, whose own operations follow."""

    def leave_attention(self, call: RecordedAttention) -> None:
        """Handles the end of the attention function."""

    def enter_loss(self, call: RecordedLoss) -> None:
        """Handles the start of the loss function; operations of its stand-in follow."""

    def leave_loss(self, call: RecordedLoss) -> None:
        """Handles the end of the loss function."""

    def question(self, question: Question) -> None:
        """Handles a question about values."""

    def numbers_given(self, values: Any) -> None:
        """Handles code that made a tensor of these Python numbers."""

    def custom_function(self, function: Function, args: Any, output: Any) -> None:
        """Handles a call of an ``autograd.Function``, or of a library's operator, with its own backward."""

    def hook_registered(self, tensor: torch.Tensor, hook: Any) -> None:
        """Handles a tensor that got a hook on its gradient."""

    def grad_fn_read(self, tensor: torch.Tensor) -> None:
        """Handles code that read the ``grad_fn`` of a tensor, where it may register hooks."""

    def packs(self, change: int) -> None:
        """Handles code that enters (1) or leaves (-1) its own hooks on tensors saved for the backward pass."""


@dataclass(frozen=True, eq=False)
class Tape:
    """Holds the events of one forward.

    Attributes:
        model: the copy on meta that ran.
        inputs: arguments of its forward.
        output: return value of its forward.
        answers: place in the code -> the answer that its question about values got.
        held: name -> a parameter or buffer; tied ones appear under each name.
        rewritten: names of those whose values were written to, as autograd counts it.
        replaced_buffers: names of buffers that are other tensors now.
        drew_at_end: whether Python's or numpy's random numbers were drawn after the last module had ended.
    """

    model: nn.Module
    inputs: Mapping[str, Any]
    output: Any
    answers: Mapping[Site, int]
    held: Mapping[str, HeldTensor]
    rewritten: frozenset[str]
    replaced_buffers: frozenset[str]
    drew_at_end: bool
    _events: Sequence[tuple[str, tuple[Any, ...]]]

    def read(self, reader: TapeReader) -> None:
        """Hands all events to a reader, in their order."""
        handlers = {name: getattr(reader, name) for name in {name for name, _ in self._events}}
        for name, arguments in self._events:
            handlers[name](*arguments)

    def calls(self) -> Iterator[Call]:
        """Returns an iterator over the calls of modules, in the order in which they began."""
        return (arguments[0] for name, arguments in self._events if name == "enter")

    @property
    def loss(self) -> RecordedLoss | None:
        """Returns the first call of the definition's ``loss_function``; None if it was not called."""
        return next((arguments[0] for name, arguments in self._events if name == "enter_loss"), None)
