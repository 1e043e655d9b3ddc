"""Resumes the optimizer at another EP: states of experts have an optimizer of their own where EP is above 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megasched.attributes import Undo, wrap_attribute
from megasched.patches.registry import Patch

_TARGET = "megatron.core.optimizer.optimizer:ChainedOptimizer.load_state_dict"
# Names in the state of a distributed optimizer (``distrib_optimizer.py:1578``).
_GROUPS, _STATE, _FORMAT = "optimizer", "param_state", "param_state_sharding_type"
_ANY_LAYOUT = "fully_reshardable"


def _change() -> Undo:
    def load_from_any(load: Callable[..., None], self: Any, state_dict: dict[Any, Any]) -> None:
        load(self, as_for(len(self.chained_optimizers), state_dict))

    return wrap_attribute(_TARGET, load_from_any)


def as_for(count: int, loaded: dict[Any, Any]) -> dict[Any, Any]:
    """Returns what was loaded for ``count`` optimizers, whether one or two have written it.

    Each optimizer has asked for the states of its parameters by their names, and has them. What a checkpoint has
    beside them (groups with their steps, the gradient scaler) is one dict of one optimizer, or one for each of two
    by its number. Both step together: groups of equal settings hold the same, whichever has the experts.

    Args:
        loaded: what Megatron hands to ``ChainedOptimizer.load_state_dict``; returned as it is where as many
            optimizers have written it, or the states are not ``fully_reshardable``.
    """
    written = [
        one for one in (loaded, *loaded.values()) if isinstance(one, dict) and one.get(_FORMAT) == _ANY_LAYOUT
    ]
    if len(written) in (0, count):
        return loaded
    ours = {*range(count), _GROUPS, _STATE}
    beside = {name: value for one in written for name, value in one.items() if name not in ours}
    beside[_GROUPS] = {"param_groups": list(_of_both_kinds(written))}
    if count == 1:
        return {**beside, _STATE: loaded[_STATE]}
    # On stages without experts one of them is empty, and asks for nothing.
    return {number: {**loaded.get(number, {}), **beside} for number in range(count)}


def _of_both_kinds(written: list[dict[Any, Any]]) -> Iterator[dict[str, Any]]:
    """Yields each group as one of experts and as one of others; Megatron looks for those that an optimizer has."""
    for one in written:
        for group in one[_GROUPS]["param_groups"]:
            for of_experts in (False, True):
                yield {**group, "is_expert_parallel": of_experts}


PATCH = Patch(
    name="expert_optimizer",
    targets=(_TARGET,),
    why=(
        "megatron/core/optimizer/optimizer.py:1573 wants as many optimizers as have written a checkpoint: experts "
        "have one of their own where EP is above 1, and none where it is 1"
    ),
    change=_change,
    signature={_TARGET: ("self", "state_dict")},
)
