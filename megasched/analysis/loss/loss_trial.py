"""Runs a definition's forward on real numbers, to learn how it computes its loss and which labels it takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from megasched.analysis.recording.meta_call import loss_function_of
from megasched.analysis.stages.loss_labels import LossLabels
from megasched.attributes import replaced
from megasched.definition.objectives import Objective

BATCH = 2  # a loss may be a sum over rows, or compare them
IGNORED = -100  # a label that does not count, to torch's cross entropy and so to Hugging Face
_TOLERANCE = 1e-5
# Of differences between losses, relative: what is in both is as large as they are.
_SAME_DIFFERENCE = 1e-3


class LossTrial:
    """Runs a definition's forward with modules that always return the same random numbers.

    Args:
        takes: form of the labels: unchanged, beside ``shift_labels``, or without the first ones.
    """

    def __init__(
        self,
        probe: Any,
        objective: Objective,
        outputs: list[tuple[str, Any]],
        read: list[nn.Parameter],
        length: int,
        takes: LossLabels,
    ) -> None:
        self.probe, self.objective, self.outputs, self.calls = probe, objective, outputs, 0
        self.length, self.takes = length, takes
        self.read = [parameter for parameter in read if parameter.requires_grad]
        classes, _ = objective.classes(probe.config)
        shape = objective.label_shape(probe.config, BATCH, length)
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.randint(classes, shape, generator=generator)
        # Ids that a loss may leave out: the first ones, and those that have a meaning.
        special = [getattr(probe.config, f"{name}_token_id", None) for name in ("pad", "bos", "eos")]
        told = [*range(4), *(n for n in special if isinstance(n, int)), classes - 1]
        ids = torch.tensor([n for n in told if 0 <= n < classes])[: self.labels.numel() // 2]
        self.labels.view(-1)[1 : 1 + len(ids)] = ids

    def forms(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields labels in a run's forms (of the next tokens, of the same places), and which of them HF counts."""
        if self.labels.dim() == 2:
            counted = torch.ones(self.labels.shape)
            counted[:, -1] = 0
            yield self.labels.roll(-1, dims=1), counted
        yield self.labels, torch.ones(self.labels.shape)

    def run(
        self, labels: torch.Tensor, *, per_token: bool = False, token: int = 0
    ) -> tuple[Any, list[torch.Tensor]]:
        """Runs one forward.

        Args:
            per_token: whether ``loss_function`` returns the loss of each label.
            token: value of all ids of the input.

        Returns:
            The forward's output, and the tensors that it is made of: parameters that the forward reads, and
            outputs of modules.
        """
        leaves: list[torch.Tensor] = list(self.read)
        inputs = {
            name: torch.full(tensor.shape, token, dtype=tensor.dtype)
            for name, tensor in self.objective.trial_inputs(self.probe.config, BATCH, self.length).items()
        }
        given = {**inputs, **self.takes.arguments(labels), **self.objective.constants}
        with _handed_out(self.probe, self.outputs, leaves), torch.random.fork_rng(devices=[]), torch.enable_grad():
            if not per_token:
                return self.probe(**given), leaves
            self.calls = 0
            with loss_function_of(self.probe, self._of_each):
                return self.probe(**given), leaves

    def loss_labels(self) -> LossLabels | None:
        """Returns the labels that the definition's own code takes; None where that can't be told.

        It compares the losses with one id and with another as the label of one position. Terms that do not depend
        on that label are in both.
        """
        if self.labels.dim() != 2:  # one for an image
            return LossLabels(moved=False, ignored=False)
        skipped, shifted = self.takes.skipped, self.takes.shifted
        place, other = (self.length + skipped) // 2 + 1, self.length - 4
        try:
            moved = self._moved(place, [place])
            alone, two = (self._difference(place, kept)[0].item() for kept in ([place], [place, other]))
        except (IndexError, RuntimeError):  # of code that takes each label for an id
            moved, alone, two = self._moved(place), 0.0, 0.0
        if moved is None or (moved and self._difference(0)[0]):  # nothing belongs at the first one
            return None
        if shifted and (moved or not self._difference(self.length - 1)[0]):  # which ``labels`` do not have
            return None
        ignored = bool(alone) and math.isclose(two, alone / 2, rel_tol=_SAME_DIFFERENCE)
        return LossLabels(moved, ignored, skipped, shifted)

    def _moved(self, place: int, kept: Sequence[int] | None = None) -> bool | None:
        """Returns whether a position's label is looked for at an earlier one; None where that can't be told."""
        difference, pairs = self._difference(place, kept)
        rows: set[int] = set()
        for pair in pairs:
            gradients = torch.autograd.grad(difference, pair, allow_unused=True, retain_graph=True)
            gradient = sum((each for each in gradients if each is not None), start=torch.zeros_like(pair[0]))
            dims = [dim for dim, size in enumerate(gradient.shape) if size == self.length]
            if not gradient.any():
                continue
            if len(dims) != 1:
                return None
            of_rows = gradient.movedim(dims[0], 0).flatten(1).abs().amax(1)
            rows.update((of_rows > _SAME_DIFFERENCE * of_rows.max()).nonzero().flatten().tolist())
        return None if not rows or max(rows) > place else max(rows) < place

    def _difference(
        self, place: int, kept: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Returns the difference of the losses with two ids as a position's label, and both runs' module outputs.

        Args:
            kept: positions whose labels count; all by default.
        """
        classes, _ = self.objective.classes(self.probe.config)
        losses, leaves = [], []
        for label in (classes // 2, classes // 3):
            labels = self.labels.clone() if kept is None else torch.full_like(self.labels, IGNORED)
            labels[:, kept or []] = self.labels[:, kept or []]
            labels[:, place] = label
            output, given = self.run(labels, token=classes // 2)
            if output.loss.dim():
                raise ValueError("a loss of each label is no number")
            losses.append(output.loss)
            leaves.append(given[len(self.read) :])
        return losses[0] - losses[1], list(zip(*leaves, strict=True))

    def _of_each(self, logits: torch.Tensor, labels: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        return cross_entropy(logits, labels)

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


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the cross entropy of each label, as ``VocabParallelLoss`` does."""
    return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)


@contextmanager
def _handed_out(probe: nn.Module, outputs: list[tuple[str, Any]], leaves: list[torch.Tensor]) -> Iterator[None]:
    """Runs its body with modules that return random numbers in place of their meta outputs, call by call."""
    generator = torch.Generator().manual_seed(1)
    left = list(outputs)

    def real(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        leaves.append(torch.randn(tensor.shape, generator=generator).to(tensor.dtype).requires_grad_())
        return leaves[-1].clone()  # the code around may write to it, which a leaf does not take

    def handing_out(path: str) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            expected, output = left.pop(0)
            if expected != path:
                raise RuntimeError(f"{path} is called where {expected} was before")
            return torch.utils._pytree.tree_map_only(torch.Tensor, real, output)

        return forward

    with ExitStack() as stack:
        for path in dict.fromkeys(path for path, _ in outputs):
            stack.enter_context(replaced(probe.get_submodule(path), "forward", handing_out(path)))
        yield
