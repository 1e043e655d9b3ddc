"""Decides whether a run can compute a definition's loss as the cross entropy of its logits.

Where it can't, it finds which labels the definition's own code takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from megasched.analysis.loss.loss_trial import BATCH, IGNORED, LossTrial, cross_entropy
from megasched.analysis.loss.plain_loss import Sizes, why_not_plain
from megasched.analysis.recording.meta_call import (
    ScalarAnswers,
    call_hooks,
    meta_copy,
    run_on_meta,
    tensors_in,
)
from megasched.analysis.recording.stock import all_stock, is_theirs
from megasched.analysis.stages.layer_stack import LayerStack
from megasched.analysis.stages.loss_labels import LossForm, LossLabels
from megasched.attributes import replaced
from megasched.definition.objectives import Objective, objective_of
from megasched.errors import ScheduleError

# Of the batch that is tried: enough labels for those that a loss may leave out; no module has such a size.
_LENGTH = 19
_AS_THEY_ARE = LossLabels(moved=False, ignored=False)
_LONG = 503  # where the first positions have none: a picture has some hundred
# Code may go by how many there are; no batch of a trial elsewhere has so many rows.
_SIZES = tuple((3, length) for length in (_LENGTH, 64, _LONG))
# Elements of parameters that a forward reads by itself, which are tried: 1 GiB.
_LARGEST = 2**28
_TORCH = vars(nn.Module()).keys()  # what torch keeps on every module


def find_loss_form(model: Any, structure: LayerStack) -> LossForm:
    """Finds the form of a definition's loss by trying it.

    The definition's own forward runs on real numbers, with random outputs in place of those of the modules that it
    calls. Its loss is compared with a run's, the cross entropy of each label, in value and gradients.

    Args:
        structure: the definition's layer stack, of which ``layers`` and ``calls_loss`` are used.
    """
    try:
        trial = _trial(model, structure, _LENGTH)
        own, given = trial.run(trial.labels)
    except Exception as error:  # of whatever kind: a meta tensor is read, or code fails on random numbers
        told = error.problems[0].what if isinstance(error, ScheduleError) else f"{type(error).__name__}: {error}"
        if (shifted := _shifted(model, structure)) is not None:
            return LossForm("it has a loss of its own, which needs shift_labels", shifted.labels)
        fewer = _fewer_labels(model, structure)
        if fewer is None:
            if structure.calls_loss and not _why_not_plain(model, structure):
                return LossForm()
            return LossForm(f"it has a loss of its own, which can't be tried ({told.partition('\n')[0]})")
        length, skipped = fewer
        another = f"it has a loss of its own, which leaves out the first {skipped} positions"
        return _by_own_code(another, _trial(model, structure, length, LossLabels(False, False, skipped)))
    if not hasattr(own, "logits"):
        what = f"its forward returns a {type(own).__name__}, and a run reads logits and loss of a ModelOutput"
        return LossForm(what)
    if own.loss is None:
        return LossForm()
    another = _another(trial, own, given, calls_loss=structure.calls_loss) or _why_not_plain(model, structure)
    if not another:
        return LossForm()
    shifted = _shifted(model, structure)
    if shifted is None:
        return _by_own_code(another, trial)
    if not _same_by_ids_alone(trial, shifted.trial):
        return LossForm(f"{another}, and it is another one with shift_labels than with labels alone")
    return LossForm(another, shifted.labels)


class _Shifted(NamedTuple):
    """Holds a trial of a loss that uses ``shift_labels``, and the labels that its code takes."""

    trial: LossTrial
    labels: LossLabels


def _shifted(model: Any, structure: LayerStack) -> _Shifted | None:
    """Returns a trial with ``shift_labels``; None where the loss does not use them."""
    try:
        trial = _trial(model, structure, _LENGTH, LossLabels(False, False, shifted=True))
        labels = trial.loss_labels()
    except Exception:  # of whatever kind, of the definition's code: it may not know that argument
        return None
    return None if labels is None else _Shifted(trial, labels)


def _same_by_ids_alone(trial: LossTrial, shifted: LossTrial) -> bool:
    """Returns whether a loss is equal with labels alone, when that of the last position does not count."""
    labels = trial.labels.clone()
    labels[:, -1] = IGNORED
    moved = LossLabels(moved=True, ignored=True).arguments(labels)["labels"]
    return torch.allclose(trial.run(moved)[0].loss, shifted.run(labels)[0].loss, rtol=1e-5, atol=0)


def _by_own_code(another: str, trial: LossTrial) -> LossForm:
    try:
        labels = trial.loss_labels()
    except Exception:  # of whatever kind, of the definition's code
        labels = None
    if labels is None:
        another += ", and what labels its own code takes can't be told by trying it"
    return LossForm(another, labels)


def _trial(model: Any, structure: LayerStack, length: int, takes: LossLabels = _AS_THEY_ARE) -> LossTrial:
    objective = objective_of(model)
    try:
        probe = meta_copy(model)
        with _layers_once(probe, structure):
            outputs, read = _outputs_of_modules(probe, objective, length, takes)
    except ScheduleError:  # the loss may read what each layer has left
        probe = meta_copy(model)
        outputs, read = _outputs_of_modules(probe, objective, length, takes)
    return LossTrial(probe, objective, outputs, _made_real(probe, model, read), length, takes)


def _fewer_labels(model: Any, structure: LayerStack) -> tuple[int, int] | None:
    """Returns a length and how many first positions have no labels, for a forward that runs only so, or None."""
    objective, probe = objective_of(model), meta_copy(model)
    for length in (_LENGTH, _LONG):
        inputs = objective.trial(getattr(probe, "config", None), BATCH, length) | objective.constants
        labels = inputs.pop("labels")
        with _layers_once(probe, structure), suppress(Exception):  # of whatever kind, of the definition's code
            run_on_meta(probe, inputs)
            for skipped in range(1, length - _LENGTH // 2 if labels.dim() > 1 else 0):
                with suppress(Exception):  # as above
                    run_on_meta(probe, {**inputs, "labels": labels[:, skipped:]})
                    return length, skipped
    return None


def _another(trial: LossTrial, own: Any, given: list[torch.Tensor], *, calls_loss: bool) -> str:
    """Returns how the loss differs from the cross entropy of each label; empty where it does not."""
    for labels, counted in trial.forms():
        try:
            output, leaves = trial.run(labels, per_token=True) if calls_loss else (own, given)
            each = output.loss if calls_loss else cross_entropy(output.logits, labels)
            ours = (each.view(labels.shape) * counted).sum() / counted.sum()
        except Exception:  # of whatever kind, of the definition's code
            return "its forward does something with its loss that a loss of each label does not take"
        if trial.calls > 1:
            return f"its forward asks for {trial.calls} losses"
        if trial.same(own.loss, given, ours, leaves):
            return ""
    return "it has a loss of its own, which is not the cross entropy of its logits"


def why_another_at(model: Any, structure: LayerStack, batch: int, length: int) -> str:
    """Returns how a loss differs from each label's cross entropy for a run's batches; empty where it does not.

    Args:
        batch, length: sizes of its micro-batches.
    """
    return _why_not_plain(model, structure, ((batch, length),))


def _why_not_plain(model: Any, structure: LayerStack, sizes: Sizes = _SIZES) -> str:
    """Returns how a loss's operations differ from the cross entropy of each label; empty where they do not.

    Transformers' own classes, whose loss was tried with numbers, depend on nothing else: the compatibility matrix
    runs them.
    """
    if structure.calls_loss and all_stock(model) and _has_transformers_function(model):
        return ""
    objective = objective_of(model)

    def inputs_of(batch: int, length: int) -> dict[str, Any]:
        return {**objective.trial(getattr(model, "config", None), batch, length), **objective.constants}

    function = structure.calls_loss and _has_transformers_function(model)
    why = ""
    for around in (partial(_layers_once, structure=structure), nullcontext):  # it may read what each has left
        try:
            why = why_not_plain(model, inputs_of, sizes, around, function=function)
        except Exception as error:  # of whatever kind, of the definition's code
            why = f"it can't be followed ({type(error).__name__}: {error})"
        if not why:
            break
    return why and f"it has a loss of its own: {why}"


def _has_transformers_function(model: Any) -> bool:
    return is_theirs(getattr(model, "loss_function", None))


@contextmanager
def _layers_once(probe: nn.Module, structure: LayerStack) -> Iterator[None]:
    """Runs its body with layers that return the first output of their class, as only the shapes count."""
    layers = [probe.get_submodule(path) for path in structure.layer_paths()]
    known: dict[type, Any] = {}

    def once(layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if type(layer) not in known:
                known[type(layer)] = forward(*args, **kwargs)
            return known[type(layer)]

        return run

    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(replaced(layer, "forward", once(layer, layer.forward)))
        yield


class _OwnReads(ScalarAnswers):
    """Notes the tensors that the model's own code reads, in operations outside of the modules taken for given.

    No tape tells: each run has the labels that are to be tried.
    """

    def __init__(self, given_whole: list[bool]) -> None:
        super().__init__()
        self.given_whole = given_whole
        self.read: dict[int, torch.Tensor] = {}

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not any(self.given_whole):
            self.read.update((id(tensor), tensor) for tensor in tensors_in((args, kwargs)))
        return super().execute(func, args, kwargs)


def _outputs_of_modules(
    probe: Any, objective: Objective, length: int, takes: LossLabels
) -> tuple[list[tuple[str, Any]], set[int]]:
    """Runs the forward on meta, and collects the outputs of the modules that it calls.

    A module that gets the labels has a part in the loss, so the modules that it calls are collected instead.

    Returns:
        Paths and outputs on meta, in the order of the calls, and the ids of tensors that the forward reads itself.
    """
    outputs: list[tuple[str, Any]] = []
    given_whole: list[bool] = []  # of the modules that run: whether this one, or one around it, is taken for given
    inputs = objective.trial(probe.config, BATCH, length)
    inputs |= takes.arguments(inputs.pop("labels"))

    def before(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        # Transformers' models get shift_labels among what they hand on, and make nothing of it.
        takes_labels = any(tensor is inputs["labels"] for tensor in tensors_in((args, kwargs)))
        given_whole.append(any(given_whole) or not takes_labels)

    def after(path: str, module: nn.Module, output: Any) -> None:
        if given_whole.pop() and not any(given_whole):
            outputs.append((path, output))

    reads = _OwnReads(given_whole)
    with call_hooks(probe, before, after):
        run_on_meta(probe, {**inputs, **objective.constants}, reads)
    return outputs, set(reads.read)


def _made_real(probe: nn.Module, model: nn.Module, read: set[int]) -> list[nn.Parameter]:
    """Gives random numbers to the tensors that the forward reads itself, and returns those that are trained.

    They are parameters, buffers, which get the model's values where it has them, and tensors that modules keep in
    their attributes from one call.

    Raises:
        RuntimeError: they are too large to be tried.
    """
    read_here = [tensor for tensor in (*probe.parameters(), *probe.buffers()) if id(tensor) in read]
    if sum(tensor.numel() for tensor in read_here) > _LARGEST:
        raise RuntimeError(f"it reads parameters of more than {_LARGEST} elements")
    generator = torch.Generator().manual_seed(2)
    real: dict[int, torch.Tensor] = {}
    modules = dict(model.named_modules())
    for path, module in probe.named_modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None or id(tensor) not in read:
                    continue
                known = getattr(modules[path], name)
                if id(tensor) not in real:
                    real[id(tensor)] = _numbers_for(tensor, known, generator)
                held[name] = real[id(tensor)]  # type: ignore[assignment]
    kept = [tensor for module in probe.modules() for tensor in _kept_real(module, generator)]
    return [*(tensor for tensor in real.values() if isinstance(tensor, nn.Parameter)), *kept]


def _kept_real(module: nn.Module, generator: torch.Generator) -> list[torch.Tensor]:
    """Gives numbers to meta tensors that a call has left in attributes, such as terms of the loss from layers."""
    made: list[torch.Tensor] = []

    def real(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta or isinstance(tensor, nn.Parameter):
            return tensor
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
        made.append(torch.rand(tensor.shape, generator=generator, device="cpu").to(tensor.dtype).requires_grad_())
        return made[-1]

    for name, value in vars(module).items():
        if name not in _TORCH and tensors_in(value):
            vars(module)[name] = torch.utils._pytree.tree_map_only(torch.Tensor, real, value)
    return made


def _numbers_for(tensor: torch.Tensor, known: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if isinstance(tensor, nn.Parameter):
        values = torch.randn(tensor.shape, generator=generator, device="cpu").to(tensor.dtype)
        return nn.Parameter(values, requires_grad=tensor.requires_grad)
    if not known.is_meta:
        return known.detach().cpu().clone()
    return torch.rand(tensor.shape, generator=generator, device="cpu").to(tensor.dtype)
