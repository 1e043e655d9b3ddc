"""Describes packed sequences: several in one row of a micro-batch, as in data for fine-tuning (``--sft``).

A definition gets position ids that restart with each sequence, and the masks that it asks HF for are
block-diagonal (``mask_interface.packed_masks``). Code without masks (Transformer Engine's kernels, Megatron's own
layers) gets cumulative lengths, under HF's names for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class PackedRows:
    """Holds the bounds of sequences in the rows of a micro-batch.

    Attributes:
        bounds: [n + 1] int32, cumulative lengths of all sequences, row after row; each row begins with a new one.
        longest: length of the longest sequence.
        rows, length: of the micro-batch.
    """

    bounds: torch.Tensor
    longest: int
    rows: int
    length: int

    @property
    def several(self) -> bool:
        """Returns whether a row holds more than one sequence."""
        return self.bounds.numel() - 1 > self.rows

    def numbers(self) -> torch.Tensor:
        """Returns the number of each token's sequence, counted over all rows: [b, s] int64."""
        return sequence_numbers(self.bounds, self.rows, self.length)

    def positions(self) -> torch.Tensor:
        """Returns the position of each token in its own sequence: [b, s] int64."""
        places = torch.arange(self.rows * self.length, device=self.bounds.device)
        return places.view(self.rows, self.length) - self.bounds.long()[self.numbers()]

    def arguments(self) -> dict[str, Any]:
        """Returns the bounds as the arguments by which HF passes them through the layers to attention."""
        return {
            "cu_seq_lens_q": self.bounds,
            "cu_seq_lens_k": self.bounds,
            "max_length_q": self.longest,
            "max_length_k": self.longest,
        }


def sequence_numbers(bounds: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """Returns ``PackedRows.numbers``, [b, s] int64, from the fields of that class."""
    numbers = torch.arange(bounds.numel() - 1, device=bounds.device)
    of_tokens = torch.repeat_interleave(numbers, bounds.diff().long(), output_size=rows * length)
    return of_tokens.view(rows, length)


def packed_mask(bounds: torch.Tensor, rows: int, length: int, window: int | None = None) -> torch.Tensor:
    """Returns a mask [b, 1, s, s], True where a token attends: to itself and earlier ones in its own sequence.

    Args:
        bounds: as in ``PackedRows``.
        window: how many tokens, itself included, a token attends to; None for all.
    """
    numbers = sequence_numbers(bounds, rows, length)
    same = numbers[:, :, None] == numbers[:, None, :]
    mask = same.tril() if window is None else same.tril() & ~torch.ones_like(same).tril(-window)
    return mask[:, None]


def is_packed_mask(mask: torch.Tensor, bounds: torch.Tensor, window: int | None) -> bool:
    """Returns whether a mask [b, 1, s, s] equals ``packed_mask``.

    The answer is stored on the mask: all layers share it, and the CPU waits for the device here.
    """
    known: dict[int | None, bool] = mask.__dict__.setdefault("megasched_packed", {})
    if window not in known:
        rows, length = mask.shape[0], mask.shape[-1]
        whole = mask.dtype == torch.bool and rows * length == int(bounds[-1])
        known[window] = whole and torch.equal(mask, packed_mask(bounds, rows, length, window).expand_as(mask))
    return known[window]
