"""Runs a definition once on the meta device (a trial call), to learn facts that no attribute holds.

It costs no memory and no arithmetic. The model that runs is a copy, and the definition stays untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from megasched.analysis.recording.meta_results import MetaResults
from megasched.analysis.recording.operators import library_operator
from megasched.analysis.recording.sites import Line, Site, asking_site, running_lines
from megasched.collector import collector_paused
from megasched.definition.module_copy import copy_module
from megasched.definition.objectives import objective_of
from megasched.definition.undisturbed import undisturbed
from megasched.errors import MegaschedError, Problem, ScheduleError


def meta_copy(model: nn.Module) -> nn.Module:
    """Returns a copy of the model on meta, with the same ties, without copying any values."""
    memo: dict[int, Any] = {}
    with collector_paused():
        for parameter in model.parameters():
            own = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            memo[id(parameter)] = own
        for buffer in model.buffers():
            memo[id(buffer)] = buffer.detach().to("meta")
        return copy_module(model, memo)


# Lines of questions that code asks to check values, and fails by 0 or False; ``checks.py`` finds them.
PASSED: set[tuple[Line, ...]] = set()


class ScalarAnswers(TorchDispatchMode):
    """Answers questions about values, which meta tensors lack, with zero or False, or with another number.

    What ``PASSED`` holds gets one or True instead.

    ``analysis/trials/ways.py`` tries what code does with other answers.

    Args:
        results: carries out all other operations.
        answer: the answer to questions about values; questions about how many there are get 1.
        answers: place in the definition's code -> the answer to its question.
    """

    def __init__(
        self, results: MetaResults | None = None, *, answer: int = 0, answers: Mapping[Site, int] | None = None
    ) -> None:
        super().__init__()
        self.answer, self.answers = answer, answers or {}
        self.silent = 0  # how many ``silently`` are entered
        self._call = (results or MetaResults()).call
        tls_of = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set
        self._undispatched = [keys() for keys in tls_of]  # of any dispatch

    @contextmanager
    def silently(self) -> Iterator[None]:
        """Runs its body with ``silent`` above 0, by which a subclass knows that it is not to look."""
        self.silent += 1
        try:
            yield
        finally:
            self.silent -= 1

    def asked_about_values(self, tensors: Sequence[torch.Tensor], site: Site | None, *, how_many: bool) -> None:
        """Handles a question about the values of tensors, or about how many elements of a kind they have.

        Args:
            tensors: the tensors that the code asks about.
            site: the place in the definition's code.
            how_many: whether it asks how many elements of a kind there are.
        """

    def numbers_given(self, values: Any) -> None:
        """Handles code that makes a tensor of numbers."""

    def grad_fn_read(self, tensor: torch.Tensor) -> None:
        """Handles code that reads a tensor's ``grad_fn``, which is not None: it may register hooks there."""

    def custom_function(self, function: Any, args: tuple[Any, ...], output: Any) -> None:
        """Handles a call of something with its own backward, after the call.

        It is an operator, or an ``autograd.Function`` in runs that watch those.
        """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = self.execute(func, args, kwargs or {})
        if (function := library_operator(func)) is not None:
            with torch._C._ForceDispatchKeyGuard(*self._undispatched):  # where there are gradients to try it with
                self.custom_function(function, (args, kwargs or {}), output)
        return output

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the output of an operation.

        Subclasses extend it, because torch wraps each class's ``__torch_dispatch__`` in two more calls.
        """
        if func not in _ANSWERED:
            return self._call(func, args, kwargs)
        answer = self._answer_to(func, args)
        if func is torch.ops.aten._local_scalar_dense.default:
            return answer > 0 if args[0].dtype == torch.bool else answer
        if func is torch.ops.aten.equal.default:
            return answer > 0
        if (
            func is torch.ops.aten.nonzero.default
        ):  # how many there are is a value; of one, all that follows is seen
            return args[0].new_empty((answer, args[0].dim()), dtype=torch.long)
        if func is torch.ops.aten._grouped_mm.default:
            # Its rule for meta takes bfloat16 alone, the kernels for CPUs and newer GPUs more than that.
            groups = (args[2].shape[0],) if args[0].dim() == args[1].dim() == 2 else ()
            return args[0].new_empty(*groups, args[0].shape[-2], args[1].shape[-1])
        if func is torch.ops.aten._unique2.default:  # the same of values: one of them, wherever it stands
            places = args[0].new_empty(args[0].shape, dtype=torch.long)
            return args[0].new_empty(answer), places, places.new_empty(answer)
        if func is torch.ops.aten.index.Tensor:  # by a mask: one place, as above
            args = (args[0], [place for index in args[1] for place in _places(index, answer)])
        if func is torch.ops.aten.split_with_sizes.default and not sum(args[1]):  # sizes that were asked for
            sizes = [args[0].shape[args[2] if len(args) > 2 else 0], *args[1][1:]]
            args = (args[0], sizes, *args[2:])
        return self._call(func, args, kwargs)

    def _answer_to(self, func: Any, args: tuple[Any, ...]) -> int:
        """Returns the answer to an operation that asks for values, and the default answer for any other."""
        masks = [] if func is not torch.ops.aten.index.Tensor else [index for index in args[1] if _is_mask(index)]
        if func not in _QUESTIONS and not masks:
            return self.answer
        site = asking_site()
        how_many = func not in _VALUES
        self.asked_about_values(masks or tensors_in(args), site, how_many=how_many)
        usual = 1 if how_many else self.answer
        answer = usual if site is None else self.answers.get(site, usual)
        return answer if answer or how_many else int(self.passes())

    def passes(self) -> bool:
        """Returns whether the code that runs asks to check values."""
        return bool(PASSED) and running_lines() in PASSED


# What ``ScalarAnswers`` looks at; all else, which is nearly all, passes it by.
_ANSWERED = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten._unique2.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten.index.Tensor,
    torch.ops.aten.split_with_sizes.default,
}


_VALUES = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}
_QUESTIONS = _VALUES | {
    torch.ops.aten.nonzero.default,
    torch.ops.aten._unique2.default,
}


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype == torch.bool


def _places(index: torch.Tensor | None, count: int) -> list[torch.Tensor | None]:
    """Returns the indices of ``count`` places that a mask selects, or an index that is no mask unchanged."""
    if index is None or not _is_mask(index):
        return [index]
    return [index.new_empty(count, dtype=torch.long) for _ in index.shape]


class Functions(TorchFunctionMode):
    """Handles calls that dispatch does not show: ``tolist``, tensors made of numbers, and reads of ``grad_fn``.

    ``tolist`` asks for one element, and every element gets that answer.

    Args:
        mode: the dispatch mode of the run.
    """

    def __init__(self, mode: TorchDispatchMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.tolist and args[0].is_meta:
            if not args[0].numel():
                return torch.empty_like(args[0], device="cpu").tolist()
            answer = args[0].flatten()[0].item()
            return torch.full(args[0].shape, answer, dtype=args[0].dtype, device="cpu").tolist()
        output = func(*args, **(kwargs or {}))
        # None is where something is tried with tensors that have values.
        if isinstance(self._mode, ScalarAnswers) and _get_current_dispatch_mode() is not None:
            if func in _OF_NUMBERS:
                data = args[_OF_NUMBERS[func] :]
                self._mode.numbers_given(data[0] if data else (kwargs or {}).get("data"))
            elif func == _GRAD_FN and output is not None:
                self._mode.grad_fn_read(args[0])
        return output


_GRAD_FN = torch.Tensor.grad_fn.__get__  # type: ignore[attr-defined]
_OF_NUMBERS = {torch.tensor: 0, torch.as_tensor: 0, torch.asarray: 0, torch.Tensor.new_tensor: 1}  # -> argument


def to_meta(value: Any) -> Any:
    """Returns the same structure with every tensor on meta."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach().to("meta"), value)


def token_inputs(batch: int, length: int) -> dict[str, torch.Tensor]:
    """Returns inputs of a causal language model on meta: token ids and labels, both [b, s] int64."""
    ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids.clone()}


def example_inputs(model: nn.Module) -> dict[str, Any] | None:
    """Returns arguments of an HF model's forward, without labels, on meta; None for any other module.

    They are a batch of the model's objective; None, too, for a model whose main input is another.
    """
    objective = objective_of(model)
    if getattr(model, "main_input_name", None) not in objective.inputs:
        return None
    return {**objective.trial_inputs(model.config, 2, 5), **objective.constants}


@contextmanager
def call_hooks(
    model: nn.Module,
    before: Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], Any] = lambda *call: None,
    after: Callable[[str, nn.Module, Any], Any] = lambda *result: None,
    around: Callable[[str, nn.Module], bool] = lambda path, module: True,
) -> Iterator[None]:
    """Calls ``before(path, module, args, kwargs)`` and ``after(path, module, output)`` around every forward.

    ``before`` may return ``(args, kwargs)`` and ``after`` an output, which replaces what they got.

    Args:
        around: ``around(path, module)`` selects the modules; errors name the innermost of these.

    Raises:
        ScheduleError: the forward raises an error that is not megasched's; names the module.
    """
    handles = []
    running: list[str] = []
    for path, module in model.named_modules():
        if not around(path, module):
            continue

        def pre(module: nn.Module, args: Any, kwargs: Any, path: str = path) -> Any:
            running.append(path)
            return before(path, module, args, kwargs)

        def post(module: nn.Module, args: Any, output: Any, path: str = path) -> Any:
            running.pop()
            return after(path, module, output)

        handles.append(module.register_forward_pre_hook(pre, with_kwargs=True))
        # HF's hooks see what this puts in the output's place, as they see what a wrapped forward returns.
        handles.append(module.register_forward_hook(post, prepend=True))
    try:
        yield
    except MegaschedError:
        raise
    except Exception as error:
        what = f"the forward fails in a trial call on the meta device: {type(error).__name__}: {error}"
        remedy = "it must run on tensors without values, with the inputs it is given"
        raise ScheduleError(Problem(what, running[-1] if running else "", remedy=remedy)) from error
    finally:
        for handle in handles:
            handle.remove()


def can_set_loss(model: nn.Module) -> bool:
    """Returns whether a model's ``loss_function`` can be replaced."""
    of_class = getattr(type(model), "loss_function", None)
    return not isinstance(of_class, property) or of_class.fset is not None


@contextmanager
def loss_function_of(model: Any, function: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Runs its body with another ``loss_function`` on an HF model, unless its class has one that can't be set."""
    if not can_set_loss(model):
        yield
        return
    held, before = vars(model), dict(vars(model))
    model.loss_function = function
    names = [name for name in held if held[name] is not before.get(name, held)]  # a property keeps it by its name
    try:
        yield
    finally:
        for name in names:
            held.pop(name, None)
        held.update({name: before[name] for name in names if name in before})


def sum_of_logits(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Returns a loss that depends on all logits; whatever a class adds to its loss, it adds to this one."""
    return logits.float().sum()


_TRAINS = ContextVar("trains", default=True)


@contextmanager
def evaluating(wanted: bool) -> Iterator[None]:
    """Runs its body with ``run_on_meta`` in evaluation mode, if ``wanted``.

    torch's own dropouts and norms go on as in training, so that the rest of what differs is looked at alone: each
    channel goes by itself in both modes.
    """
    token = _TRAINS.set(not wanted)
    try:
        yield
    finally:
        _TRAINS.reset(token)


def is_training() -> bool:
    """Returns whether ``run_on_meta`` runs models in training mode now."""
    return _TRAINS.get()


def _set_mode(model: nn.Module) -> None:
    model.train(is_training())
    for module in model.modules() if not is_training() else ():
        if isinstance(module, nn.modules.dropout._DropoutNd | nn.modules.batchnorm._NormBase):
            module.train()


def run_on_meta(
    model: nn.Module,
    inputs: Mapping[str, Any],
    mode: TorchDispatchMode | None = None,
    *,
    autograd: bool = False,
    leaves_traces: bool = False,
) -> Any:
    """Runs one forward and returns its output; the model must be a ``meta_copy``.

    It runs in training mode, but within ``evaluating``.

    Args:
        leaves_traces: whether changes to state outside of modules stay for the next call; see ``undisturbed``.
    """
    _set_mode(model)
    mode = mode or ScalarAnswers()
    with (
        collector_paused(),
        nullcontext() if leaves_traces else undisturbed(model),
        torch.set_grad_enabled(autograd),
        torch.device("meta"),
        Functions(mode),
        mode,
    ):
        return model(**inputs)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns every tensor in a nested structure, also inside HF's ``ModelOutput``."""
    found: list[torch.Tensor] = []
    _collect(value, found)
    return found


_PLAIN = {type(None), bool, int, float, str, torch.dtype, torch.device}


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    """Appends the tensors of a structure to ``found``.

    ``tree_leaves`` takes ten times as long, and runs ask at each operation, so it serves the rare types alone.
    """
    kind = type(value)
    if kind is tuple or kind is list:
        for item in value:
            _collect(item, found)
    elif kind is dict:
        for item in value.values():
            _collect(item, found)
    elif isinstance(value, torch.Tensor):
        found.append(value)
    elif kind not in _PLAIN:
        found += [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
