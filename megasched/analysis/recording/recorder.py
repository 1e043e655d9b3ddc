"""Writes a tape (``tape.py``) in the one dispatch mode of all analyses that follow a forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megasched.analysis.recording.backward_code import Function, watched_backward
from megasched.analysis.recording.chance import PythonDraws
from megasched.analysis.recording.checks import pass_checks
from megasched.analysis.recording.meta_call import (
    ScalarAnswers,
    call_hooks,
    loss_function_of,
    run_on_meta,
    sum_of_logits,
)
from megasched.analysis.recording.operators import storage_of, written
from megasched.analysis.recording.shape_changes import as_they_were
from megasched.analysis.recording.sites import Line, Site, running_lines
from megasched.analysis.recording.surroundings import Surroundings
from megasched.analysis.recording.tape import (
    Alias,
    Call,
    HeldTensor,
    Operation,
    Question,
    RecordedAttention,
    RecordedLoss,
    Tape,
)
from megasched.analysis.recording.trees import snapshot
from megasched.collector import collector_paused
from megasched.definition import attention_interface
from megasched.errors import ScheduleError


class Enough(BaseException):
    """Ends a forward early; it is a ``BaseException``, so that no handler of errors catches it."""


@dataclass(frozen=True)
class Boundaries:
    """Says where a tape replaces tensors by aliases, because they may mean something else to ranks from there on.

    These places are the layers, and the modules that layers call.

    Attributes:
        layers: paths of the layers.
        below: beginning of the paths of layers, and of all modules in them.
        last: path of the last layer that runs; None where there is none.
        hidden: where the hidden state stands in a layer's output (a ``HiddenStateArg``).
        around: paths of the modules that hold the layers.
    """

    layers: frozenset[str] = frozenset()
    below: str = ""
    last: str | None = None
    hidden: Any = None
    around: frozenset[str] = frozenset()

    def is_below_layer(self, path: str) -> bool:
        """Returns whether the module at a path lies in a layer, and is not a layer itself."""
        return bool(self.layers) and path.startswith(self.below) and "." in path[len(self.below) :]


NO_BOUNDARIES = Boundaries()


@collector_paused()
def record_tape(
    model: nn.Module,
    inputs: Mapping[str, Any],
    boundaries: Boundaries = NO_BOUNDARIES,
    *,
    answers: Mapping[Site, int] | None = None,
    own_loss: bool = False,
    lines: bool = False,
    until_loss: bool = False,
    most_calls: int | None = None,
) -> Tape:
    """Runs a forward in training mode with gradients, and returns its tape.

    Where a check of values fails, which a trial does not have, it runs again, with an answer that passes.

    Args:
        model: a ``meta_copy`` of a definition.
        inputs: arguments of its forward, tensors on meta.
        answers: answers to questions about values; see ``ScalarAnswers``.
        own_loss: whether the definition's own code computes the loss; else its ``loss_function`` is replaced.
        lines: whether the tape has the lines of the definition's code, which take time to find.
        until_loss: whether the forward ends where the loss function is called.
        most_calls: number of module calls after which the forward ends.

    Raises:
        ScheduleError: the forward does not run on meta, or changes what is around the modules that it calls.
    """
    parameters_and_buffers = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    held = {
        name: HeldTensor(tensor, storage_of(tensor), tensor._version) for name, tensor in parameters_and_buffers
    }
    buffers = dict(model.named_buffers())
    recorder = _Recorder(model, inputs, boundaries, answers, lines=lines, until_loss=until_loss, most=most_calls)
    output = None
    try:
        with (
            suppress(Enough),
            nullcontext() if own_loss else loss_function_of(model, recorder.lose),
            attention_interface.use_attention(recorder.attend),
            call_hooks(model, recorder.before, recorder.after),
            watched_backward(recorder.custom_function, recorder.hook_registered, recorder.packs),
        ):
            output = run_on_meta(model, inputs, recorder, autograd=True)
    except ScheduleError:
        if not pass_checks(model, inputs):
            raise
        options: dict[str, Any] = {"own_loss": own_loss, "lines": lines, "until_loss": until_loss}
        return record_tape(model, inputs, boundaries, answers=answers, most_calls=most_calls, **options)
    now = dict(model.named_buffers())
    return Tape(
        model,
        recorder.inputs,
        output,
        recorder.answers,
        held,
        frozenset(name for name, one in held.items() if one.tensor._version != one.version),
        frozenset(name for name, buffer in buffers.items() if now.get(name) is not buffer),
        recorder.draws.drawn(),
        recorder.events,
    )


@dataclass
class _Running:
    """Holds the module calls in progress, outermost first.

    Attributes:
        handed: arguments of each forward, which it may write to.
        outermost: how many calls were in progress when the first module below a layer was called.
        layer: how many were in progress when the first layer was called.
    """

    calls: list[Call] = field(default_factory=list)
    handed: list[tuple[Any, Any]] = field(default_factory=list)
    outermost: int | None = None
    layer: int | None = None

    def is_outermost(self) -> bool:
        """Returns whether the innermost call is that of the first module below a layer."""
        return self.outermost == len(self.calls) - 1


class _Recorder(ScalarAnswers):
    def __init__(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        boundaries: Boundaries,
        answers: Mapping[Site, int] | None,
        *,
        lines: bool,
        until_loss: bool,
        most: int | None,
    ) -> None:
        super().__init__(answers=answers)
        self.inputs = dict(inputs)
        self.boundaries = boundaries
        self._lines: Callable[[], tuple[Line, ...]] = running_lines if lines else tuple
        self._until_loss, self._most = until_loss, most
        self._surroundings = Surroundings(model)
        self._begun = 0
        self.events: list[tuple[str, tuple[Any, ...]]] = []
        self.draws = PythonDraws()
        self.real_attention = attention_interface.registered()
        self._running = _Running()

    def _happened(self, name: str, *arguments: Any) -> None:
        if not self.silent:
            self.events.append((name, arguments))

    # operations -------------------------------------------------------------------------------------

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = [(tensor, _lies(tensor)) for tensor in written(func, args, kwargs)]
        output = super().execute(func, args, kwargs)
        reshaped = [(tensor, lay) for tensor, lay in changed if _lies(tensor) != lay]
        if reshaped and not self.silent:
            with self.silently():
                before = {id(tensor): tensor.as_strided(*lay) for tensor, lay in reshaped}
            self.events, self.inputs = as_they_were((self.events, self.inputs), before)
            args, kwargs = as_they_were((args, kwargs), before)
        if not self.silent:
            self.events.append(("operation", (Operation.done(func, args, kwargs, output, self._lines()),)))
        return output

    def asked_about_values(self, tensors: Sequence[torch.Tensor], site: Site | None, *, how_many: bool) -> None:
        self._happened("question", Question(tensors, site, how_many))

    def numbers_given(self, values: Any) -> None:
        self._happened("numbers_given", snapshot(values))

    def grad_fn_read(self, tensor: torch.Tensor) -> None:
        self._happened("grad_fn_read", tensor)

    def hook_registered(self, tensor: torch.Tensor, hook: Any) -> None:
        """See ``watched_backward``."""
        self._happened("hook_registered", tensor, hook)

    def custom_function(self, function: Function, args: tuple[Any, ...], output: Any) -> None:
        self._happened("custom_function", function, args, output)

    def packs(self, change: int) -> None:
        """See ``watched_backward``."""
        self._happened("packs", change)

    # calls ------------------------------------------------------------------------------------------

    def before(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._begun == self._most:
            raise Enough
        self._surroundings.check(path, module)
        self._begun += 1
        drew = self._drew()
        index = len(self._running.calls)
        if self._running.layer is None and path in self.boundaries.layers:
            self._running.layer = index
        if self._running.outermost is None and self.boundaries.is_below_layer(path):
            self._running.outermost = index
        entered: Sequence[Alias] = ()
        changed = None
        if path in self.boundaries.layers or self._running.outermost == index:
            entered, changed = self._aliased_arguments(args, kwargs)
        call = Call(path, module, *snapshot(changed or (args, kwargs)), entered, drew, torch.is_grad_enabled())
        self._running.calls.append(call)
        self._running.handed.append(changed or (args, kwargs))
        self._happened("enter", call)
        return changed

    def after(self, path: str, module: nn.Module, output: Any) -> Any:
        call = self._running.calls[-1]
        if self._running.layer == len(self._running.calls) - 1:
            self._running.layer = None
        call.drew_inside = self._drew()
        handed = self._running.handed.pop()
        if path in self.boundaries.layers:
            call.left = snapshot(handed)
        call.output = call.returned = output
        if self._running.is_outermost() or path in self.boundaries.around:
            call.exited, call.returned = self._aliased_leaves(output)
        elif path == self.boundaries.last:
            hidden = self.boundaries.hidden.result(output)
            alias = self._alias(hidden)
            call.exited = [Alias(hidden, alias)]
            call.returned = self.boundaries.hidden.rewrap(output, alias)
        if self._running.is_outermost():
            self._running.outermost = None
        self._running.calls.pop()
        call.end = self._begun
        self._happened("leave", call)
        return None if call.returned is output else call.returned

    def _drew(self) -> bool:
        """Returns whether Python's random numbers were drawn since the last call of this method.

        Always False inside of layers, and where the layers are not known.
        """
        return bool(self.boundaries.layers) and self._running.layer is None and self.draws.drawn()

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Stands in for the attention function in transformers' registry, and records its call."""
        call = RecordedAttention(module, query, key, value, args, kwargs)
        self._happened("enter_attention", call)
        call.output = self.real_attention(module, query, key, value, *args, **kwargs)
        self._happened("leave_attention", call)
        return call.output

    def lose(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Stands in for a definition's ``loss_function``, and records its call."""
        call = RecordedLoss(logits, args, kwargs)
        self._happened("enter_loss", call)
        call.output = sum_of_logits(logits)
        if self._until_loss:
            raise Enough
        self._happened("leave_loss", call)
        return call.output

    # boundaries -------------------------------------------------------------------------------------

    def _aliased_arguments(self, args: Any, kwargs: Any) -> tuple[list[Alias], tuple[Any, Any]]:
        aliases: list[Alias] = []

        def one(value: Any) -> Any:
            # A parameter stays one: code may ask whether it is.
            if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
                return value
            known = next((alias for source, alias in aliases if source is value), None)
            if known is None:
                known = self._alias(value)
                aliases.append(Alias(value, known))
            return known

        changed = tuple(map(one, args)), {name: one(value) for name, value in kwargs.items()}
        return aliases, changed

    def _aliased_leaves(self, output: Any) -> tuple[list[Alias], Any]:
        leaves, structure = torch.utils._pytree.tree_flatten(output)
        aliases: list[Alias] = []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter):
                leaves[index] = self._alias(leaf)
                aliases.append(Alias(leaf, leaves[index]))
        return aliases, torch.utils._pytree.tree_unflatten(leaves, structure)

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.silently():
            return tensor.view_as(tensor)


def _lies(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], int]:
    """Returns a tensor's layout in its storage: shape, strides and offset."""
    return tensor.shape, tensor.stride(), int(tensor.storage_offset())
