"""Connects a loss that the definition's own code computes with Megatron's trainer.

The trainer takes a loss of each label, sums those that its loss mask counts, and divides by their number. The one
number that the definition gives stands in the place of each, so the trainer comes to that number and to its
gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from megasched.analysis.loss.loss_form import why_another_at
from megasched.analysis.loss.loss_trial import IGNORED
from megasched.analysis.stages.layer_stack import LayerStack
from megasched.analysis.stages.loss_labels import LossLabels
from megasched.definition.undisturbed import undisturbed
from megasched.errors import ConfigError, Problem, ScheduleError
from megasched.plan.plan import Plan
from megasched.trainer.stages.stage_transfer import StageBuffers

REMEDY = "have the forward hand its logits and labels to transformers' loss_function, and add to that"


class DefinitionLoss:
    """Prepares labels for the definition's forward, and the loss that it returns for Megatron.

    Args:
        takes: form of the labels that its code takes.
        shape: returns the shape of labels for a batch and a length.
        last: whether this is the last stage.
    """

    def __init__(self, takes: LossLabels, shape: Callable[[int, int], tuple[int, ...]], *, last: bool) -> None:
        self.takes, self.shape, self.last = takes, shape, last
        self._weight = 1.0  # of the micro-batch whose labels were handed over last

    def arguments(
        self, labels: torch.Tensor | None, loss_mask: torch.Tensor | None, wire: StageBuffers
    ) -> dict[str, torch.Tensor]:
        """Returns the labels as arguments of the forward; none on the last stage where there are no labels.

        Earlier stages get zeros as labels, so that the code goes the same way there.
        """
        if self.last:
            return {} if labels is None else self.takes.arguments(self.masked_labels(labels, loss_mask))
        zeros = torch.zeros(self.shape(wire.batch, wire.length), dtype=torch.long, device=wire.device)
        return self.takes.arguments(zeros)

    def masked_labels(self, labels: torch.Tensor, loss_mask: torch.Tensor | None) -> torch.Tensor:
        """Returns the labels, with ``IGNORED`` in place of those that do not count.

        Args:
            labels: [b, s] (or [b]), the id that belongs at each position.
            loss_mask: of the same shape, 1 where a label counts and 0 where it does not.

        Raises:
            ConfigError: the definition's loss can't leave out what does not count, or sequences are too short for
                it.
        """
        if loss_mask is None:
            raise ConfigError(
                "the definition's own code computes the loss, and the training script does not tell it what "
                "counts: hand loss_mask to the model in the script's forward_step"
            )
        mask = loss_mask
        if self.takes.moved:  # it does not look at the last one
            mask = torch.cat([mask[:, :-1], mask.new_ones(len(mask), 1)], dim=1)
        self._weight = 1.0
        if bool((mask != 1).any()):
            if bool((mask[:, :-1] if self.takes.moved else mask).any()):
                self._refuse_mask(mask, mask != 0)
                labels = labels.masked_fill(mask == 0, IGNORED)
            else:  # a mean over no labels would be no number
                self._weight = 0.0
        if labels.dim() > 1 and labels.shape[1] < self.takes.skipped + 2:
            raise ConfigError(
                f"the definition's own loss leaves out the first {self.takes.skipped} positions, and sequences "
                f"have {labels.shape[1]}: give more tokens (--seq-length)"
            )
        return labels

    def _refuse_mask(self, loss_mask: torch.Tensor, counted: torch.Tensor) -> None:
        what = ""
        if not self.takes.ignored:
            what = f"it takes labels of {IGNORED} for others, or not the mean over the rest"
        elif bool((loss_mask[counted] != 1).any()):
            what = f"labels can be told by {IGNORED} not to count, and not to count in part"
        if what:
            raise ConfigError(
                "the loss mask of a batch is not 1 everywhere, and the definition's own loss can't be told so: "
                f"{what}. Train on data without masked labels (no --eod-mask-loss), or {REMEDY}"
            )

    def each(self, logits: torch.Tensor, loss: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the definition's loss in the place of each label's.

        Args:
            logits: whole logits of the forward.
            loss: loss of the forward, one number.
            labels: as Megatron has them.

        Returns:
            float32, contiguous, in the shape of the labels.
        """
        return (self._weight * loss.float()).expand(labels.shape).contiguous()

    @staticmethod
    def whole(logits: torch.Tensor) -> torch.Tensor:
        """Returns the logits, which are whole."""
        return logits


def refuse_loss(plan: Plan) -> None:
    """Refuses a loss that a run does not compute as plain transformers does.

    Raises:
        ScheduleError: with what speaks against it.
    """
    if plan.structure is None or not plan.structure.loss.another:
        return
    another, layout = plan.structure.loss.another, plan.layout
    if plan.structure.loss_labels is None:
        what = f"{another}; a run computes the cross entropy of each label in its place"
        raise ScheduleError(Problem(what, remedy=REMEDY))
    what = f"{another}; its own code computes it, "
    if layout.cp > 1:
        what += "and needs whole sequences, of which a context parallel rank has a part"
        raise ScheduleError(Problem(what, remedy=f"run it without --context-parallel-size, or {REMEDY}"))
    if layout.packed_sequences:
        what += "and takes a row for one sequence, where --sft packs several"
        raise ScheduleError(Problem(what, remedy=f"run it without --sft, or {REMEDY}"))


def refuse_loss_of_batches(model: Any, structure: LayerStack | None, sizes: Iterable[tuple[int, int]]) -> None:
    """Refuses a loss that differs for a run's batches from that of trials, as code may count the tokens.

    Args:
        model: the definition, as it runs.
        sizes: rows of each micro-batch, and tokens in a row.

    Raises:
        ScheduleError: with what speaks against it.
    """
    if structure is None or structure.loss.another:
        return
    for batch, length in dict.fromkeys(sizes):
        with undisturbed(model):
            why = why_another_at(model, structure, batch, length)
        if why:
            what = f"for {batch} x {length} tokens {why}; "
            what += "a run computes the cross entropy of each label in its place"
            raise ScheduleError(Problem(what, remedy=REMEDY))


def refuse_per_token(plan: Plan, calculate_per_token_loss: bool) -> None:
    """Refuses ``--calculate-per-token-loss`` where the definition gives one loss for a micro-batch.

    Raises:
        ScheduleError: for ``--calculate-per-token-loss``.
    """
    if calculate_per_token_loss and plan.structure is not None and plan.structure.loss_labels is not None:
        what = f"{plan.structure.loss.another}; its own code gives one number for a micro-batch, and "
        what += "--calculate-per-token-loss needs the loss of each label"
        raise ScheduleError(Problem(what, remedy=f"run it without that flag, or {REMEDY}"))


def loss_lines(plan: Plan) -> list[str]:
    """Returns a line about a loss that the definition's own code computes; empty for other losses."""
    if plan.structure is None or plan.structure.loss_labels is None:
        return []
    whole = ", on whole logits, which each TP rank gathers" if plan.layout.tp > 1 else ""
    where = " on the last stage" if plan.layout.pp > 1 else ""
    return [f"{plan.structure.loss.another}: its own code computes the loss{where}{whole}"]
