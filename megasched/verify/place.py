"""Where wrong numbers come from: which step and micro-batch to look at, and the module or parameter there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megasched.verify.locate import NOTICED, Finding, Locator
from megasched.verify.numbers import Errors, Number, difference, replicas
from megasched.verify.plain_runs import PlainRun

# Of the largest weight: what a step of rounding comes to is a tenth.
NOTICED_IN_WEIGHTS = 1e-6
DRIFT = "the ranks that hold this parameter no longer hold the same"
STEP = "what the optimizer does with it: its group, its weight decay, or whether it is trained at all"


def first_wrong(wrong: Mapping[Number, float], states: bool) -> tuple[int, int] | None:
    """Step and micro-batch with the first wrong number; None where only what is left after the steps is wrong.

    Args:
        states: hidden states of the first micro-batch are wrong.
    """
    steps = [number.step for number in wrong if number.step >= 0]
    if states or not steps:
        return (0, 0) if states else None
    step = min(steps)
    places = [int(number.name) for number in wrong if number.kind == "logits" and number.step == step]
    return step, min(places, default=0)


def place_of(locator: Locator, plain: PlainRun, look: tuple[int, int]) -> Finding | None:
    """What is wrong in the step that was looked at: the weights that it began with, a module, or a parameter.

    Args:
        locator: of the runs that looked there.
    """
    if look[0] > 0:
        found = _weights_before(locator, plain)
        if found is not None:
            return found
    return locator.first()


def _weights_before(locator: Locator, plain: PlainRun) -> Finding | None:
    """The parameter that is furthest off before a later step."""
    errors: dict[str, dict[int, float]] = {}
    for rank, name, shard, cut in replicas(locator.reports, "before", locator.tp):
        wanted = plain.before[name]
        size = max(float(wanted.abs().max()), 1e-6)
        errors.setdefault(name, {})[rank] = difference(shard, cut(wanted), -size)
    return _of_weights(locator, errors, NOTICED_IN_WEIGHTS * 10)


def first_weight(locator: Locator, errors: Errors, wrong: Mapping[Number, float]) -> Finding | None:
    """The parameter or buffer that is furthest off after the steps."""
    held = {number.name: errors.ranks[number] for number in wrong if number in errors.ranks}
    return _of_weights(locator, held, NOTICED)


def _of_weights(locator: Locator, errors: Mapping[str, Mapping[int, float]], noticed: float) -> Finding | None:
    if not errors:
        return None
    name = max(errors, key=lambda one: max(errors[one].values()))
    of_ranks = errors[name]
    if not max(of_ranks.values()) > noticed:
        return None
    ranks = tuple(rank for rank, error in sorted(of_ranks.items()) if error > noticed)
    cause = DRIFT if len(ranks) < len(of_ranks) else STEP
    found = locator.finding_at(name, "its value after the optimizer's step", ranks, "", cause)
    return replace(found, direction="backward", error=max(of_ranks.values()))
