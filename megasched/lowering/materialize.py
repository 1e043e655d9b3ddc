"""Fills weights that were deferred, of an unscheduled model or of one that was built without them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megasched.lowering.build import fill_built, is_built
from megasched.weights.source import WeightSource
from megasched.weights.source import materialize as fill

if TYPE_CHECKING:
    import torch


def materialize[Model](model: Model, source: WeightSource, dtype: torch.dtype | None = None) -> Model:
    """Gives every parameter of a model a real CPU tensor from the source, in place; returns the model.

    Of a model that ``build`` has cut, or a stage, each rank reads and keeps its shards alone. Tied parameters stay
    one parameter, ``requires_grad`` is kept, and persistent buffers that the source has are filled.

    Args:
        model: unscheduled, e.g. from ``build_definition``, or built, or a stage.
        source: ``HFFolder`` or ``RandomInit``, made with a definition that is not built.
        dtype: of the parameters; float32 by default. Buffers keep theirs.

    Raises:
        CheckpointError: the source does not fit the model, or a buffer of that is on the meta device.
    """
    given: Any = model
    if is_built(given):
        fill_built(given, source, dtype)
    else:
        fill(given, source, dtype)
    return model
