"""Computes the loss of a run: mostly one in place of HF's, per token, over logits cut along the vocabulary."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch.nn import functional as F

from megasched.definition.objectives import objective_of
from megasched.layers.losses.cross_entropy import loss_of_each_label
from megasched.plan.plan import Plan
from megasched.trainer.losses.definition_loss import DefinitionLoss


class VocabParallelLoss:
    """Computes the loss of each label, also where logits are cut along the vocabulary.

    The definition calls it as ``model.loss_function``, or ``ScheduledModel`` does. Labels are shifted already, as
    Megatron's are.

    Args:
        vocab_size: real size of the vocabulary, where the head is cut; columns past it are padding.
        sharded: whether the head is cut over TP; a whole head gives whole logits.
    """

    def __init__(self, vocab_size: int, sharded: bool, group: torch.distributed.ProcessGroup) -> None:
        self.vocab_size, self.sharded, self.group = vocab_size, sharded, group

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns the loss of each label.

        Args:
            logits: [b, s, v / tp] (or [b, s, v]; [b, v] of images), of any floating dtype.
            labels: [b, s] (or [b]), the id that belongs at each position.

        Returns:
            float32, contiguous, in the shape of the labels.
        """
        if self._is_whole(logits):
            rows = logits.float().flatten(0, -2)
            return F.cross_entropy(rows, labels.flatten(), reduction="none").view(labels.shape)
        return loss_of_each_label(logits, labels, self.vocab_size, self.group)

    def _is_whole(self, logits: torch.Tensor) -> bool:
        """Returns whether each rank has all logits: the head is whole, or other code than the head's made them."""
        return not self.sharded or (self.group.size() > 1 and logits.shape[-1] == self.vocab_size)

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Gathers the logits, [b, s, v / tp] -> [b, s, v], with the padding cut off."""
        if self._is_whole(logits):
            return logits
        return gather_from_tensor_model_parallel_region(logits, group=self.group)[..., : self.vocab_size]


def make_loss(
    definition: Any, plan: Plan, group: torch.distributed.ProcessGroup, *, last: bool
) -> VocabParallelLoss | DefinitionLoss:
    """Creates the loss of a stage.

    Args:
        definition: the lowered definition.
        group: Megatron's TP group.
        last: whether it is the last stage.
    """
    if plan.stack.loss_labels is not None:
        shape = partial(objective_of(definition).label_shape, definition.config)
        return DefinitionLoss(plan.stack.loss_labels, shape, last=last)
    heads = [plan.placement(path, "weight") for path in sorted(plan.tp_facts.logits)]
    vocabulary = heads[0].shape[heads[0].axis or 0] if heads else 0
    return VocabParallelLoss(vocabulary, bool(heads), group)
