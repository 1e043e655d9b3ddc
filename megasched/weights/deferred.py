"""Says what a rank holds of a model whose weights are deferred, by the names of the definition."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from megasched.errors import CheckpointError, some_of
from megasched.language.lora import adapted, adapter_names
from megasched.plan.placement import Placement
from megasched.plan.plan import Plan
from megasched.weights.lora import AdaptedSource
from megasched.weights.source import Shards, WeightSource

if TYPE_CHECKING:
    import torch


def with_adapters(source: WeightSource, plan: Plan) -> WeightSource:
    """Returns a source that has the adapters of a plan as well, with the values that they start with."""
    names = adapter_names(adapted(plan.records))
    return AdaptedSource(source, names) if names else source


def shards_of(plan: Plan, placements: Mapping[str, Placement], ranks: Mapping[str, tuple[int, int]]) -> Shards:
    """Says what a rank holds of a plan's model.

    Args:
        placements: of the parameters that it has.
        ranks: as in ``Shards``.

    Raises:
        CheckpointError: a function was to make a parameter, and had no values to make it of.
    """
    renamed, lost = plan.replaced.renamed, plan.replaced.lost
    made = sorted(plan.replaced.made.intersection(plan.canonical))
    if made:
        raise CheckpointError(
            f"a function of replace has made {some_of(made)} of weights that were deferred, so that no source has "
            "it; fill the definition before it is built: megasched.materialize(model, source)"
        )
    named = {name: replace(one, name=renamed.get(one.name, one.name)) for name, one in placements.items()}
    names = {renamed.get(name, name) for name in plan.canonical.values()}
    return Shards(named, names | lost, ranks, renamed)


class HeldValues:
    """Provides what was read ahead from another source: what a rank holds, each value once.

    Args:
        source: is read now.
        shards: of the rank.
        dtype: of the parameters.

    Raises:
        CheckpointError, ConfigError: the source does not have all of it.
    """

    def __init__(self, source: WeightSource, shards: Shards, dtype: torch.dtype | None) -> None:
        source.check(shards.names)
        self._source = source
        placements = {placement.name: placement for placement in shards.placements.values()}
        self._values = {name: shards.read(source, one).to(dtype) for name, one in placements.items()}

    def local(self, placement: Placement, rank: int, size: int) -> torch.Tensor:
        """See ``WeightSource.local``."""
        return self._values.pop(placement.name)

    def buffer(self, name: str) -> torch.Tensor | None:
        """See ``WeightSource.buffer``."""
        return self._source.buffer(name)

    def check(self, names: Collection[str]) -> None:
        """Does nothing, as the other source was checked."""
