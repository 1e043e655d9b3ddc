"""Fills weights that were deferred, of an unscheduled model or of one that was built without them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megasched.lowering.build import is_built, placements_of
from megasched.weights.source import Shards, WeightSource
from megasched.weights.source import materialize as fill

if TYPE_CHECKING:
    import torch


def materialize[Model](model: Model, source: WeightSource, dtype: torch.dtype | None = None) -> Model:
    """Gives every parameter of an HF model a real CPU tensor from the source, in place; returns the model.

    Of a model that ``build`` has cut, each rank reads and keeps its shards alone. Tied parameters stay one
    parameter, ``requires_grad`` is kept, and persistent buffers that the source has are filled.

    Args:
        model: unscheduled, e.g. from ``build_definition``, or built.
        source: ``HFFolder`` or ``RandomInit``, made with a definition that is not built.
        dtype: of the parameters; float32 by default. Buffers keep theirs.

    Raises:
        CheckpointError: the source does not fit the model, or a buffer of that is on the meta device.
    """
    built: Any = model
    if not is_built(built):
        return fill(built, source, dtype)
    return fill(built, source, dtype, Shards(placements_of(built), *_rank_and_size()))


def _rank_and_size() -> tuple[int, int]:
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return 0, 1
    group = parallel_state.get_tensor_model_parallel_group()
    return group.rank(), group.size()
