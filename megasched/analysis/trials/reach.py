"""Finds which parameters training reaches, by the autograd graph of a forward's loss on meta.

Plain PyTorch leaves all other gradients at None, and its optimizers skip those parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from megasched.analysis.notes.code_facts import CodeFacts
from megasched.analysis.recording.meta_call import (
    ScalarAnswers,
    call_hooks,
    loss_function_of,
    run_on_meta,
    sum_of_logits,
    tensors_in,
)
from megasched.analysis.recording.sites import Site, running_lines
from megasched.analysis.recording.tape import Operation
from megasched.analysis.trials.choices import counterparts
from megasched.errors import ScheduleError
from megasched.language.module_paths import is_within


@dataclass(frozen=True)
class Reach:
    """Holds which parameters a training step reaches; a tied parameter has its first name.

    Attributes:
        never: parameters that no batch reaches.
        perhaps: parameters that the trial did not reach, but a batch's values may: an expert that got no token.
        uncalled: modules that have some of ``never`` and were not called.
        code_facts: which lines of the code have run; None where the forward failed.
    """

    never: tuple[str, ...] = ()
    perhaps: tuple[str, ...] = ()
    uncalled: frozenset[str] = frozenset()
    code_facts: CodeFacts | None = field(default=None, compare=False, repr=False)


def find_reach(model: nn.Module, inputs: Mapping[str, Any], *, with_loss: bool) -> Reach:
    """Finds the parameters that a forward on meta in training mode reaches.

    Where it does not reach all, it runs once more with other answers to questions about values.

    Args:
        model: a ``meta_copy`` of the definition.
        inputs: arguments of its forward, on meta; the length of the sequence counts.
        with_loss: the loss is the one that the forward returns; else it is made of the logits.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    run = _ReachRun(model, inputs, with_loss)
    if run.reached is None:
        return Reach()
    code_facts = run.code_facts
    left = {name for name, parameter in trained.items() if id(parameter) not in run.reached}
    if not left:
        return Reach(code_facts=code_facts)
    other = _ReachRun(model, inputs, with_loss, answer=1)
    by_values = set() if other.reached is None else {name for name in left if id(trained[name]) in other.reached}
    for name in left - by_values:
        if run.has_reached_another(name) or (other.reached is None and run.asked_around(name)):
            by_values.add(name)
    never = [name for name in trained if name in left and name not in by_values]
    owners = {name.rpartition(".")[0] for name in never}
    called = run.called | other.called
    perhaps = tuple(name for name in trained if name in by_values)
    return Reach(tuple(never), perhaps, frozenset(owners - called), code_facts)


class _ReachRun(ScalarAnswers):
    """Runs one forward, and finds the parameters that its loss depends on.

    No tape tells: it runs with tokens of the real length, and walks autograd's graph, which a tape does not keep.

    Attributes:
        reached: identities of parameters; None if the forward failed.
        called: paths of the modules that ran.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any], with_loss: bool, answer: int = 0) -> None:
        super().__init__(answer=answer)
        self.called: set[str] = set()
        self.reached: set[int] | None = None
        self._model = model
        self._stack: list[str] = []
        self._asked: set[str] = set()
        self._read_aside: set[int] = set()
        self._parameters = {id(parameter) for parameter in model.parameters()}
        self.code_facts = CodeFacts()
        self.code_facts.note_model(model, dict(inputs))
        with (
            suppress(ScheduleError),
            loss_function_of(model, sum_of_logits),
            call_hooks(model, self._before, self._after),
        ):
            output = run_on_meta(model, inputs, self, autograd=True)
            self.reached, by_functions = _sources(_roots(output, with_loss))
            if by_functions:  # their backward may have a gradient for what they have read
                self.reached |= self._read_aside
        self.code_facts.let_go()

    def _before(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._stack.append(path)
        self.called.add(path)

    def _after(self, path: str, module: nn.Module, output: Any) -> None:
        self._stack.pop()

    def asked_about_values(self, tensors: Sequence[torch.Tensor], site: Site | None, *, how_many: bool) -> None:
        self._asked.add(self._stack[-1] if self._stack else "")
        self.code_facts.note_question(tensors, site, how_many=how_many)

    def numbers_given(self, values: Any) -> None:
        self.code_facts.note_given(self._stack[-1] if self._stack else "", values)

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = super().execute(func, args, kwargs)
        operation = Operation.done(func, args, kwargs, output, running_lines())
        if not torch.is_grad_enabled():
            self._read_aside.update(self._parameters.intersection(map(id, operation.operands)))
        self.code_facts.note(self._stack[-1] if self._stack else "", operation)
        return output

    def asked_around(self, name: str) -> bool:
        """Returns whether the code that decides about calling this parameter's module asked for values."""
        return self._caller(name.rpartition(".")[0]) in self._asked

    def has_reached_another(self, name: str) -> bool:
        """Returns whether a counterpart in a list or dict was reached, and values may choose between the two."""
        parameters, reached = dict(self._model.named_parameters()), self.reached or set[int]()
        return any(
            other in parameters and id(parameters[other]) in reached and self._asked_in(self._caller(path))
            for path, other in counterparts(self._model, name)
        )

    def _caller(self, path: str) -> str:
        """Returns the path of the nearest module around this one, or itself, that ran."""
        while path and path not in self.called:
            path = path.rpartition(".")[0]
        return path

    def _asked_in(self, path: str) -> bool:
        return any(is_within(asked, path) for asked in self._asked)


def _roots(output: Any, with_loss: bool) -> list[torch.Tensor]:
    found = getattr(output, "loss" if with_loss else "logits", None)
    return [found] if isinstance(found, torch.Tensor) else tensors_in(output)


def _sources(roots: Iterable[torch.Tensor]) -> tuple[set[int], bool]:
    """Returns the ids of leaves that tensors depend on, and whether own backward functions lie between."""
    reached, own = set[int](), False
    waiting: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        own = own or isinstance(node, BackwardCFunction)
        if hasattr(node, "variable"):
            reached.add(id(node.variable))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return reached, own
