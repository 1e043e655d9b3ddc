"""Checks by its operations whether a definition's loss is the cross entropy of each label and nothing else.

Numbers show it for the ids, the batch and the length that are tried. Operations show it for all: code that looks
at labels or ids, depends on how many there are, or bends large values, has other operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import nn

from megasched.analysis.loss.loss_trial import IGNORED
from megasched.analysis.notes.python_state import State
from megasched.analysis.recording.meta_call import (
    ScalarAnswers,
    loss_function_of,
    meta_copy,
    run_on_meta,
    tensors_in,
)

_aten = torch.ops.aten
# What leaves a tensor's elements as they are, each in its place among the others.
_VIEWS = {
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten._reshape_alias.default,
    _aten.reshape.default,
    _aten.alias.default,
    _aten.clone.default,
    _aten.contiguous.default,
    _aten._to_copy.default,
    _aten.detach.default,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.unsqueeze.default,
    _aten.transpose.int,
    _aten.t.default,
    _aten.permute.default,
    _aten.lift_fresh.default,
}
_KEEPS_LABELS = {*_VIEWS} - {_aten.transpose.int, _aten.t.default, _aten.permute.default}
# Of a loss: what comes to the same whether it is done to the mean or to each label's.
_SUMS = {"add", "add_", "sub", "sub_", "rsub"}
_PRODUCTS = {"mul", "mul_"}
_QUOTIENTS = {"div", "div_"}
_OF_ONE = {_aten.neg.default, *_VIEWS} - {_aten.transpose.int, _aten.t.default, _aten.permute.default}
_MEAN = 1  # torch's number for that reduction


class _LossRun(ScalarAnswers):
    """Notes how the output of a forward came about.

    No tape tells: the loss is followed at several lengths and answers, with the modules around it standing still.

    Args:
        labels: the labels that it gets.
        answer: answer to its questions about values.
    """

    def __init__(self, labels: torch.Tensor, answer: int) -> None:
        super().__init__(answer=answer)
        self.labels = {id(labels): labels}
        self.losses: dict[int, torch.Tensor] = {}
        self.made: dict[int, tuple[Any, tuple[Any, ...], torch.Tensor]] = {}
        self.fault, self.calls = "", 0
        self.asked = False  # for a value

    def loss_of_each(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor | None = None,
        vocab_size: Any = None,
        num_items_in_batch: Any = None,
        ignore_index: int = IGNORED,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Stands in for transformers' loss function; returns float32 in the labels' shape."""
        self.calls += 1
        if self.calls > 1:
            self._note("its forward asks for several losses")
        if labels is None or id(labels) not in self.labels or shift_labels is not None:
            self._note("it hands other labels than its own to its loss function")
        if num_items_in_batch is not None or ignore_index != IGNORED:
            self._note("it hands numbers of its own to its loss function")
        loss = logits.new_empty(logits.shape[:-1], dtype=torch.float32)
        self.losses[id(loss)] = loss
        return loss

    def asked_about_values(self, tensors: Any, site: Any, *, how_many: bool) -> None:
        self.asked = True

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = super().execute(func, args, kwargs)
        given = tensors_in((args, kwargs))
        if isinstance(output, torch.Tensor):
            self.made[id(output)] = func, args, output
        elif func in (_aten.nll_loss_forward.default, _aten.nll_loss2d_forward.default):
            self.made[id(output[0])] = func, args, output[0]
        if any(id(tensor) in self.labels for tensor in given):
            self._look_at_labels(func, args, output)
        if any(id(tensor) in self.losses for tensor in given):
            self._look_at_loss(func, args, output)
        return output

    def _look_at_labels(self, func: Any, args: tuple[Any, ...], output: Any) -> None:
        if func not in _KEEPS_LABELS or output.shape != args[0].shape:
            self._note(f"its code looks at the labels ({func})")
        else:
            self.labels[id(output)] = output

    def _look_at_loss(self, func: Any, args: tuple[Any, ...], output: Any) -> None:
        name = func.overloadpacket.__name__
        of_loss = [isinstance(each, torch.Tensor) and id(each) in self.losses for each in args[:2]]
        each_by_itself = (
            func in _OF_ONE
            or name in _SUMS
            or (name in _PRODUCTS and not all(of_loss))
            or (name in _QUOTIENTS and of_loss == [True, False] and len(args) == 2)
        )
        if each_by_itself:
            self.losses[id(output)] = output
        else:
            self._note(f"it makes something of its loss ({func})")

    def _note(self, what: str) -> None:
        self.fault = self.fault or what

    # by hand ------------------------------------------------------------------------------------------

    def is_cross_entropy(self, loss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> bool:
        """Returns whether a loss is the mean cross entropy of logits and labels, by what made it."""
        func, args = self._behind(loss)
        if func not in (_aten.nll_loss_forward.default, _aten.nll_loss2d_forward.default):
            return False
        likely, wanted, weight, reduction, ignored = args
        if weight is not None or reduction != _MEAN or ignored != IGNORED:
            return False
        func, args = self._behind(likely)
        if func is not _aten._log_softmax.default or args[2]:
            return False
        return self._comes_from(args[0], logits) and self._comes_from(wanted, labels)

    def _behind(self, tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        """Returns the operation that made a tensor, past views, and its arguments."""
        func, args, _ = self.made.get(id(tensor), (None, (), tensor))
        while func in _VIEWS:
            func, args, _ = self.made.get(id(args[0]), (None, (), tensor))
        return func, args

    def _comes_from(self, tensor: torch.Tensor, source: torch.Tensor) -> bool:
        """Returns whether a tensor is the source itself, but for views and a shift by one place.

        The shift may leave out a place at one end, and add one that does not count.
        """
        while tensor is not source:
            func, args, _ = self.made.get(id(tensor), (None, (), tensor))
            if func is _aten.slice.Tensor:
                dim, shorter = (args[1] if len(args) > 1 else 0), args[0]
                if shorter.shape[dim] - tensor.shape[dim] not in (0, 1) or args[4:] not in ((), (1,)):
                    return False
            elif func is _aten.constant_pad_nd.default:
                if sum(args[1]) > 1 or min(args[1]) < 0 or args[2:] != (IGNORED,):
                    return False
            elif func not in _VIEWS:
                return False
            tensor = args[0]
        return True


type InputsOf = Callable[[int, int], Mapping[str, Any]]
type Sizes = Sequence[tuple[int, int]]
type Around = Callable[[nn.Module], AbstractContextManager[None]]


def why_not_plain(model: nn.Module, inputs_of: InputsOf, sizes: Sizes, around: Around, *, function: bool) -> str:
    """Returns how a loss differs from the cross entropy of each label; empty where it does not.

    Args:
        model: the definition; what runs are copies of it on meta.
        inputs_of: returns arguments of its forward, labels among them, for a number of rows and a length.
        sizes: sizes of batches, rows and tokens in each; sequences longer than it takes are left out.
        around: context in which a copy runs.
        function: whether transformers' function computes the loss, which a run replaces while the rest of the code
            stays as it is. Else a run takes the logits alone.

    Raises:
        Exception: any exception of its code, which takes none of these sizes.
    """
    errors, ran = [], False
    copies = _Copies(model)
    for rows, length in sizes:
        for answer in (0, 1):
            try:
                run, output, given = _run(
                    copies.unused(), inputs_of(rows, length), answer, around, function=function
                )
            except Exception as error:  # of whatever kind: more positions than it has, or a check that fails
                errors.append(error)
                if not answer and _runs_without_labels(model, inputs_of(rows, length), around):
                    return f"it fails for {length} tokens ({type(error).__name__}: {error})"
                continue
            loss = getattr(output, "loss", None)
            if loss is None:
                return "its forward does not always give a loss"
            if function and (run.fault or id(loss) not in run.losses):
                return run.fault or "what its loss function gives is not its loss"
            if not function and not run.is_cross_entropy(loss, output.logits, given):
                return "its own code does more than the cross entropy of its logits"
            ran = True
            if not run.asked:
                break
    if not ran:
        raise errors[0]
    return ""


class _Copies:
    """Makes copies of a model on meta, and reuses one that the model's own code left unchanged."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.probe = model, meta_copy(model)
        self._before = State(self.probe)

    def unused(self) -> nn.Module:
        """Returns a copy in its original state."""
        if self._before.changed(State(self.probe)):
            self.probe = meta_copy(self.model)
            self._before = State(self.probe)
        return self.probe


def _runs_without_labels(model: nn.Module, inputs: Mapping[str, Any], around: Around) -> bool:
    probe = meta_copy(model)
    with suppress(Exception), around(probe):  # of whatever kind, of the definition's code
        run_on_meta(probe, {name: value for name, value in inputs.items() if name != "labels"})
        return True
    return False


def _run(
    probe: nn.Module, inputs: Mapping[str, Any], answer: int, around: Around, *, function: bool
) -> tuple[_LossRun, Any, torch.Tensor]:
    """Runs two calls, and returns the second, as code may do something else from then on."""

    def once() -> tuple[_LossRun, Any, torch.Tensor]:
        run = _LossRun(inputs["labels"], answer)
        with loss_function_of(probe, run.loss_of_each) if function else nullcontext(), around(probe):
            output = run_on_meta(probe, inputs, run, leaves_traces=True)
        return run, output, inputs["labels"]

    first = once()
    return first if first[0].fault else once()
