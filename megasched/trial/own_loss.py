"""Whether the loss of a definition is the cross entropy of its logits, which a run computes in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from megasched.errors import ScheduleError
from megasched.objectives import Objective, objective_of
from megasched.trial.meta_call import (
    DefaultScalars,
    call_hooks,
    loss_function_of,
    meta_copy,
    run_on_meta,
    tensors_in,
)
from megasched.trial.structure import Structure

# Of the batch that is tried: enough labels for those that a loss may leave out.
_BATCH, _LENGTH = 1, 16
_TOLERANCE = 1e-5
# Elements of parameters that a forward reads by itself, which are tried: 1 GiB.
_LARGEST = 2**28


class OwnLoss(NamedTuple):
    """How a definition computes its loss.

    Attributes:
        why_another: what of it a run would not compute; empty where it computes all.
        calls: how often its forward asks ``loss_function`` for one, where that could be tried.
    """

    why_another: str = ""
    calls: int = 1


def own_loss(model: Any, structure: Structure | None) -> OwnLoss:
    """Tries a definition's loss.

    The definition's own forward runs on real numbers: the modules that it calls are taken for given and hand out
    random ones. Its loss is compared with what a run has, the cross entropy of each label, in value and gradients.
    """
    objective = objective_of(model)
    probe: Any = meta_copy(model)
    try:
        with _layers_once(probe, structure):
            outputs, read = _outputs_of_modules(probe, objective)
        trial = _Trial(probe, objective, outputs, _made_real(probe, model, read))
        own, given = trial.run(None)
    except Exception as error:  # of whatever kind: a meta tensor is read, or code fails on random numbers
        told = error.problems[0].what if isinstance(error, ScheduleError) else f"{type(error).__name__}: {error}"
        return OwnLoss(_why_not_by_reading(model, structure, told.partition("\n")[0]))
    if not hasattr(own, "logits"):
        what = f"its forward returns a {type(own).__name__}, and a run reads logits and loss of a ModelOutput"
        return OwnLoss(what)
    if own.loss is None:
        return OwnLoss(calls=0)
    calls_loss = structure is not None and structure.calls_loss
    for labels, counted in trial.forms():
        try:
            output, leaves = trial.run(labels, per_token=True) if calls_loss else (own, given)
            each = output.loss if calls_loss else _cross_entropy(output.logits, labels)
            ours = (each.view(labels.shape) * counted).sum() / counted.sum()
        except Exception:  # of whatever kind, of the definition's code
            return OwnLoss("its forward does something with its loss that a loss of each label does not take")
        if trial.same(own.loss, given, ours, leaves):
            return OwnLoss(calls=trial.calls)
    return OwnLoss("it has a loss of its own, which is not the cross entropy of its logits")


def _why_not_by_reading(model: Any, structure: Structure | None, error: str) -> str:
    """Where its code can't be tried: it may hand its logits once, with the labels, to transformers' function."""
    if structure is not None and structure.calls_loss and _has_transformers_function(model):
        return ""
    return f"it has a loss of its own, which can't be tried ({error})"


def _has_transformers_function(model: Any) -> bool:
    function = getattr(model, "loss_function", None)
    return str(getattr(function, "__module__", "")).startswith("transformers.")


@contextmanager
def _layers_once(probe: nn.Module, structure: Structure | None) -> Iterator[None]:
    """Has layers of a kind that ran once give what that one gave: of what they give, the shapes count."""
    layers = [probe.get_submodule(path) for path in (structure.layer_paths() if structure is not None else ())]
    known: dict[type, Any] = {}

    def once(layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if type(layer) not in known:
                known[type(layer)] = forward(*args, **kwargs)
            return known[type(layer)]

        return run

    for layer in layers:
        layer.forward = once(layer, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


class _Reads(DefaultScalars):
    """Notes what tensors the model's own code reads: operations while no module is taken for given."""

    def __init__(self, given_whole: list[bool]) -> None:
        super().__init__()
        self.given_whole = given_whole
        self.read: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not any(self.given_whole):
            self.read.update((id(tensor), tensor) for tensor in tensors_in((args, kwargs or {})))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _outputs_of_modules(probe: Any, objective: Objective) -> tuple[list[tuple[str, Any]], set[int]]:
    """What the modules give that the forward calls, in their order: paths and outputs on meta. A module that is
    handed the labels has a part in the loss; what it calls counts in its place.

    Returns:
        Those outputs, and the ids of tensors that the forward reads by itself.
    """
    outputs: list[tuple[str, Any]] = []
    given_whole: list[bool] = []  # of the modules that run: whether this one, or one around it, is taken for given
    inputs = objective.trial(probe.config, _BATCH, _LENGTH)

    def before(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        takes_labels = any(tensor is inputs["labels"] for tensor in tensors_in((args, kwargs)))
        given_whole.append(any(given_whole) or not takes_labels)

    def after(path: str, module: nn.Module, output: Any) -> None:
        if given_whole.pop() and not any(given_whole):
            outputs.append((path, output))

    reads = _Reads(given_whole)
    with call_hooks(probe, before, after):
        run_on_meta(probe, {**inputs, **objective.constants}, reads)
    return outputs, set(reads.read)


def _made_real(probe: nn.Module, model: nn.Module, read: set[int]) -> list[nn.Parameter]:
    """Gives parameters and buffers that the forward reads by itself numbers: a buffer those that it has, where it
    has them. Returns the parameters.

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
    return [tensor for tensor in real.values() if isinstance(tensor, nn.Parameter)]


def _numbers_for(tensor: torch.Tensor, known: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if isinstance(tensor, nn.Parameter):
        values = torch.randn(tensor.shape, generator=generator, device="cpu").to(tensor.dtype)
        return nn.Parameter(values, requires_grad=tensor.requires_grad)
    if not known.is_meta:
        return known.detach().cpu().clone()
    return torch.rand(tensor.shape, generator=generator, device="cpu").to(tensor.dtype)


class _Trial:
    """Runs of a definition's forward in which the modules that it calls hand out the same random numbers."""

    def __init__(
        self, probe: Any, objective: Objective, outputs: list[tuple[str, Any]], read: list[nn.Parameter]
    ) -> None:
        self.probe, self.objective, self.outputs, self.calls = probe, objective, outputs, 0
        self.read = [parameter for parameter in read if parameter.requires_grad]
        classes, _ = objective.classes(probe.config)
        shape = objective.label_shape(probe.config, _BATCH, _LENGTH)
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.randint(classes, shape, generator=generator)
        # Ids that a loss may leave out: the first ones, and those that have a meaning.
        special = [getattr(probe.config, f"{name}_token_id", None) for name in ("pad", "bos", "eos")]
        told = [*range(4), *(n for n in special if isinstance(n, int)), classes - 1]
        ids = torch.tensor([n for n in told if 0 <= n < classes])[: self.labels.numel() // 2]
        self.labels.view(-1)[1 : 1 + len(ids)] = ids

    def forms(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Labels as a run has them, of the next tokens or of the same places, and which of them HF counts."""
        if self.labels.dim() == 2:
            counted = torch.ones(self.labels.shape)
            counted[:, -1] = 0
            yield self.labels.roll(-1, dims=1), counted
        yield self.labels, torch.ones(self.labels.shape)

    def run(self, labels: torch.Tensor | None, *, per_token: bool = False) -> tuple[Any, list[torch.Tensor]]:
        """One forward.

        Args:
            labels: in the place of ``self.labels``.
            per_token: ``loss_function`` gives the loss of each label.

        Returns:
            What the forward returns, and what it is made of: parameters that the forward reads by itself, and
            what the modules handed out.
        """
        leaves: list[torch.Tensor] = list(self.read)
        inputs = {
            name: torch.zeros(tensor.shape, dtype=tensor.dtype)
            for name, tensor in self.objective.trial_inputs(self.probe.config, _BATCH, _LENGTH).items()
        }
        given = {**inputs, "labels": self.labels if labels is None else labels, **self.objective.constants}
        with _handed_out(self.probe, self.outputs, leaves), torch.random.fork_rng(devices=[]), torch.enable_grad():
            if not per_token:
                return self.probe(**given), leaves
            self.calls = 0
            with loss_function_of(self.probe, self._of_each):
                return self.probe(**given), leaves

    def _of_each(self, logits: torch.Tensor, labels: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        return _cross_entropy(logits, labels)

    @staticmethod
    def same(
        own: torch.Tensor, own_leaves: list[torch.Tensor], ours: torch.Tensor, leaves: list[torch.Tensor]
    ) -> bool:
        if own.dim() or not torch.allclose(own, ours, _TOLERANCE, 0):
            return False
        pairs = [
            torch.autograd.grad(loss, sources, allow_unused=True, retain_graph=True)
            for loss, sources in ((own, own_leaves), (ours, leaves))
        ]
        return all(_close(one, other) for one, other in zip(*pairs, strict=True))


def _close(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    one, other = (torch.zeros(()) if each is None else each for each in (one, other))
    return torch.allclose(one, other, _TOLERANCE, _TOLERANCE * float(other.abs().max()))


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of each label, as ``VocabParallelLoss`` gives it."""
    return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)


@contextmanager
def _handed_out(probe: nn.Module, outputs: list[tuple[str, Any]], leaves: list[torch.Tensor]) -> Iterator[None]:
    """Has the modules give random numbers in the place of what they gave on meta, in the order of the calls."""
    generator = torch.Generator().manual_seed(1)
    left = list(outputs)

    def real(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        leaves.append(torch.randn(tensor.shape, generator=generator).to(tensor.dtype).requires_grad_())
        return leaves[-1]

    def forward_of(path: str) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            expected, output = left.pop(0)
            if expected != path:
                raise RuntimeError(f"{path} is called where {expected} was before")
            return torch.utils._pytree.tree_map_only(torch.Tensor, real, output)

        return forward

    changed = [probe.get_submodule(path) for path in dict.fromkeys(path for path, _ in outputs)]
    before = [vars(module).get("forward") for module in changed]
    for module, path in zip(changed, dict.fromkeys(path for path, _ in outputs), strict=True):
        module.forward = forward_of(path)
    try:
        yield
    finally:
        for module, own in zip(changed, before, strict=True):
            if own is None:
                del module.forward
            else:
                module.forward = own
