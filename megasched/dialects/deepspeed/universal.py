"""Tells DeepSpeed's universal checkpoints how HF's tensors lie over the TP ranks.

A universal checkpoint has whole tensors under HF's names, and loads at another TP x DP. What a rank holds is
described by affine views of the whole tensor (deepspeed/checkpoint/affine.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch import nn

from megasched.errors import ConfigError
from megasched.plan.placement import Placement

# The version that DeepSpeed 0.19 reads affine maps in (checkpoint/constants.py).
_VERSION = 0.4


def describe_shards(model: nn.Module, placements: Mapping[str, Placement], tp: int) -> None:
    """Sets what DeepSpeed reads off a model and its parameters when it saves and loads a universal checkpoint.

    Args:
        placements: of the parameters by their names, which are HF's.
        tp: ranks in the TP group.

    Raises:
        ConfigError: two vocabularies of different sizes are padded.
    """
    from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

    maps: dict[str, Any] = {}
    vocabularies: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        placement = placements[name]
        pattern = f"^{re.escape(name)}$"
        if placement.padded not in (None, placement.shape[placement.axis or 0]):
            vocabularies[pattern] = placement.shape[0]  # DeepSpeed cuts its padding off, and pads it anew
            continue
        maps[pattern] = _affine(placement, tp).to_dict()
        setattr(parameter, DS_AUTOTP_UC_META, {"conversion": {"affine_map": maps[pattern]}})
    info: dict[str, Any] = {
        "universal_checkpoint_version": _VERSION,
        "affine_map": {"version": 1, "params": maps},
    }
    if len(set(vocabularies.values())) > 1:
        sizes = ", ".join(f"{name[1:-1]}: {size}" for name, size in vocabularies.items())
        raise ConfigError(f"DeepSpeed's universal checkpoints know one padded vocabulary, and there are {sizes}")
    if vocabularies:
        info["vocabulary_parameter_patterns"] = list(vocabularies)
        info["original_vocab_size"] = next(iter(vocabularies.values()))
    model.universal_checkpoint_info = info  # type: ignore[assignment]


def _affine(placement: Placement, tp: int) -> Any:
    """Returns DeepSpeed's map of one HF tensor: which blocks of it each TP rank holds, and where."""
    from deepspeed.checkpoint.affine import AffinePiece, ParamAffineMap

    source, shapes, pieces = _strides(placement.shape), {}, {}
    for rank in range(tp):
        local = shapes[rank] = placement.local_shape(tp)
        upright = list(reversed(local)) if placement.transposed else list(local)
        strides = _strides(local)
        strides = strides[::-1] if placement.transposed else strides
        axis = placement.axis
        if axis is None:
            pieces[rank] = [AffinePiece(placement.shape, 0, source, 0, strides, range(tp))]
            continue
        ranges = placement.ranges(rank, tp)
        places = accumulate((stop - start for start, stop in ranges), initial=0)
        pieces[rank] = [
            AffinePiece(
                [*upright[:axis], stop - start, *upright[axis + 1 :]],
                *(start * source[axis], source, place * strides[axis], strides, [rank]),
            )
            for (start, stop), place in zip(ranges, places, strict=False)
        ]
    found = ParamAffineMap(placement.shape, shapes, pieces)
    found.validate()
    return found


def _strides(shape: Sequence[int]) -> list[int]:
    """Returns the strides of a contiguous tensor."""
    return [*accumulate(reversed(shape[1:]), lambda size, length: size * length, initial=1)][::-1]
