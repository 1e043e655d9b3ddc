"""To which lengths Megatron pads a vocabulary, so that the TP ranks have equal parts of it."""

from __future__ import annotations

from typing import Any


def padded_lengths(length: int, args: Any) -> set[int]:
    """How long an embedding or head over a vocabulary may be in a checkpoint.

    Args:
        length: of the vocabulary.
        args: Megatron's, of the run that wrote the checkpoint; None of weights that were imported.
    """
    divisor, tp = (
        getattr(args, name, None) for name in ("make_vocab_size_divisible_by", "tensor_model_parallel_size")
    )
    multiple = divisor * tp if divisor and tp else 1
    return {length, -(-length // multiple) * multiple}
