"""Computes the cross entropy of logits that are cut along the vocabulary over TP, without gathering them."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import nn
from torch.nn import functional as F

from megasched.layers.embedding import refuse_ids

type Group = torch.distributed.ProcessGroup

_REDUCTIONS = ("mean", "sum", "none")  # of torch's own


def loss_of_each_label(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, group: Group) -> torch.Tensor:
    """Returns the loss of each label, [...] float32, contiguous.

    Args:
        logits: [..., v / tp], of any floating dtype; they stay as they are, as hooks on the head may hold them.
        labels: [...], an id of the vocabulary, or any other where the loss is not used.
        vocab_size: real size of the vocabulary; columns past it are padding and take no part in the softmax, so
            that the loss does not depend on TP.
    """
    real = vocab_size - group.rank() * logits.shape[-1]
    own = logits.float()
    if real < logits.shape[-1]:
        own = _mask(own, max(real, 0))
    elif logits.dtype == torch.float32:
        own = logits.clone()  # Megatron writes into them
    return vocab_parallel_cross_entropy(own, labels, tp_group=group).contiguous()


def _mask(logits: torch.Tensor, real: int) -> torch.Tensor:
    # The lowest finite number, not -inf: a rank may hold padding alone, and the maximum is subtracted.
    padding = torch.arange(logits.shape[-1], device=logits.device) >= real
    return logits.masked_fill(padding, torch.finfo(logits.dtype).min)


class ParallelCrossEntropy(nn.Module):
    """Computes what ``nn.CrossEntropyLoss`` does, of logits that are cut along the vocabulary over TP.

    Args:
        vocab_size: size of the whole vocabulary, as in an HF model's config; logits may have padding behind it.
        ignore_index, reduction: as of ``nn.CrossEntropyLoss``.
        group: the ranks over which logits are cut; by default Megatron's tensor-parallel group.
    """

    def __init__(
        self, vocab_size: int, ignore_index: int = -100, reduction: str = "mean", group: Group | None = None
    ) -> None:
        super().__init__()
        if reduction not in _REDUCTIONS:
            raise ValueError(f"reduction={reduction!r}: it is one of {', '.join(_REDUCTIONS)}")
        self.vocab_size, self.ignore_index, self.reduction, self.group = vocab_size, ignore_index, reduction, group

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the mean of the losses of all labels that count, their sum, or each (0 for one that does not).

        Args:
            logits: [..., v / tp], this rank's columns; or [..., v], whole.
            labels: [...], the id that belongs at each position: of a causal model those of the next token.

        Raises:
            ValueError: the ranks together have fewer columns than the vocabulary.
            ConfigError: a label is none of the vocabulary, and not ``ignore_index``.
        """
        counted = labels != self.ignore_index
        refuse_ids("the labels", labels.where(counted, 0), self.vocab_size, below_zero=True)
        group, columns = self._group(), logits.shape[-1]
        if columns >= self.vocab_size:
            whole = logits[..., : self.vocab_size].float().flatten(0, -2)
            each = F.cross_entropy(whole, labels.flatten(), ignore_index=self.ignore_index, reduction="none")
            each = each.view(labels.shape)
        elif group is None or columns * group.size() < self.vocab_size:
            ranks = "one rank" if group is None else f"each of {group.size()} ranks"
            raise ValueError(f"the logits have {columns} columns on {ranks}, and vocab_size is {self.vocab_size}")
        else:
            each = loss_of_each_label(logits, labels, self.vocab_size, group).masked_fill(~counted, 0)
        if self.reduction == "none":
            return each
        return each.sum() / counted.sum() if self.reduction == "mean" else each.sum()

    def _group(self) -> Group | None:
        from megatron.core import parallel_state

        if self.group is not None or not parallel_state.model_parallel_is_initialized():
            return self.group
        group: Group = parallel_state.get_tensor_model_parallel_group()
        return group


class ParallelLossFunction:
    """Stands in for the ``loss_function`` of an HF causal model whose logits are cut; called as HF's own."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Returns the loss of a batch; the arguments are those of transformers' ``ForCausalLMLoss``."""
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss: torch.Tensor = ParallelCrossEntropy(vocab_size, ignore_index, reduction, self.group)(
            logits, shift_labels.to(logits.device)
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch
