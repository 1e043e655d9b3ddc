"""One forward of a definition on the meta device, written down once: what analyses find out is a function of it.

A tape holds the very tensors of the forward, so that a tensor is known by its identity for as long as the tape
lives. An analysis is a ``TapeReader``: it is handed the events in the order in which they happened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from megasched.analysis.recording.sites import Line, Site

if TYPE_CHECKING:
    from megasched.analysis.recording.backward_code import Function


@dataclass(slots=True, eq=False)
class Operation:
    """An operation that torch carried out.

    Attributes:
        func: the operator, as torch dispatches it.
        operands, outputs: the tensors in its arguments, and in what it gave.
        lines: of the definition's code that had it done; empty where the tape has no lines.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    operands: list[torch.Tensor]
    outputs: list[torch.Tensor]
    lines: tuple[Line, ...]


class Alias(NamedTuple):
    """A tensor that goes into a module, or out of it, as another one of the same values."""

    source: torch.Tensor
    alias: torch.Tensor


@dataclass(slots=True, eq=False)
class Call:
    """A call of a module.

    Attributes:
        args, kwargs: as the forward got them; lists and mappings are copies, made when it began.
        output: what the forward returned.
        returned: the same as the caller got it.
        left: of a layer, ``args`` and ``kwargs`` when it had ended: it may have written to mappings among them.
        entered: of the tensors that the caller handed those that the forward got as another one.
        exited: of the tensors in ``output`` those that the caller got as another one.
        drew_before: Python's random numbers, or numpy's, were drawn since the module before it began or ended;
            False inside of a layer, which draws on one stage alone.
        drew_inside: the same, until it ended.
        autograd: whether it was called where gradients are recorded.
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
    """A call of the attention function that transformers' registry has.

    Attributes:
        query, key, value: [b, heads, s, d].
        args, kwargs: what else it got, the mask first.
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
    """A call of a definition's ``loss_function``; what a tape has of it is another function, of all logits."""

    logits: torch.Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None


@dataclass(slots=True, eq=False)
class Question:
    """Code asks for values, which tensors on meta have not, or for how many there are of a kind.

    Attributes:
        tensors: that it asks about.
        site: where in the definition's code; None where it is none of its.
    """

    tensors: Sequence[torch.Tensor]
    site: Site | None
    how_many: bool


class HeldTensor(NamedTuple):
    """A parameter or a buffer as it was before the forward: where its values are, and their version."""

    tensor: torch.Tensor
    storage: int
    version: int


class TapeReader:
    """What an analysis does at each event; nothing by default."""

    def operation(self, operation: Operation) -> None:
        """Torch carried out an operation."""

    def enter(self, call: Call) -> None:
        """A module's forward begins. What it returns is not known yet."""

    def leave(self, call: Call) -> None:
        """It has ended."""

    def enter_attention(self, call: RecordedAttention) -> None:
        """The attention function begins; its own operations follow."""

    def leave_attention(self, call: RecordedAttention) -> None:
        """It has ended."""

    def enter_loss(self, call: RecordedLoss) -> None:
        """The loss function begins; operations of what stands in for it follow."""

    def leave_loss(self, call: RecordedLoss) -> None:
        """It has ended."""

    def question(self, question: Question) -> None:
        """Code asked about values."""

    def numbers_given(self, values: Any) -> None:
        """Code made a tensor of these Python numbers."""

    def custom_function(self, function: Function, args: Any, output: Any) -> None:
        """Something with a backward of its own has run: an ``autograd.Function``, or an operator of a library."""

    def hook_registered(self, tensor: torch.Tensor, hook: Any) -> None:
        """A tensor got a hook on its gradient."""

    def grad_fn_read(self, tensor: torch.Tensor) -> None:
        """Code read the ``grad_fn`` of a tensor, where it may register hooks."""

    def packs(self, change: int) -> None:
        """Code enters (1), or leaves (-1), hooks of its own on tensors that are saved for the backward pass."""


@dataclass(frozen=True, eq=False)
class Tape:
    """What happened in one forward.

    Attributes:
        model: the copy on meta that ran.
        inputs: arguments of its forward.
        output: what it returned.
        answers: place in the code -> the answer that was given there to a question about values.
        held: name -> a parameter, or a buffer; of tied ones each name.
        rewritten: names of those whose values were written to, as autograd counts it.
        replaced_buffers: names of buffers that are other tensors now.
        drew_at_end: Python's random numbers, or numpy's, were drawn after the last module had ended.
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
        """Hands a reader all events, in their order."""
        handlers = {name: getattr(reader, name) for name in {name for name, _ in self._events}}
        for name, arguments in self._events:
            handlers[name](*arguments)

    def calls(self) -> Iterator[Call]:
        """The calls of modules, in the order in which they began."""
        return (arguments[0] for name, arguments in self._events if name == "enter")

    @property
    def loss(self) -> RecordedLoss | None:
        """The first call of the definition's ``loss_function``."""
        return next((arguments[0] for name, arguments in self._events if name == "enter_loss"), None)
