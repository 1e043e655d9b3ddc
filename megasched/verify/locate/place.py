"""Finds where wrong numbers come from: the step and micro-batch to look at, and the module or parameter there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megasched.verify.locate.locate import NOTICED, Finding, Locator
from megasched.verify.numbers import Errors, Number, difference, replicas
from megasched.verify.parity import TOLERANCE
from megasched.verify.plain.runs import OPTIMIZER, PlainRun

# Of what a step may change a weight by.
NOTICED_IN_WEIGHTS = 1e-2
DRIFT = "the ranks that hold this parameter no longer hold the same"
OF_LOSS = "the logits are right: look at the labels, at what of them counts, and at what the class adds"
COUNTED = (
    "each gradient is right: a parameter is counted on no rank, or on several (by its tensor_model_parallel and "
    "shared, which Megatron reads)"
)
UNUSED = "no step gives it a gradient: torch leaves it as it is then, and Megatron decays it"
STEP = "what the optimizer does with it: its group, its weight decay, or whether it is trained at all"


def first_wrong(wrong: Mapping[Number, float], states: bool) -> tuple[int, int] | None:
    """Returns step and micro-batch of the first wrong number; None where only values after the steps are wrong.

    Args:
        states: whether hidden states of the first micro-batch are wrong.
    """
    steps = [number.step for number in wrong if number.step >= 0]
    if states or not steps:
        return (0, 0) if states else None
    step = min(steps)
    places = [int(number.name) for number in wrong if number.kind == "logits" and number.step == step]
    return step, min(places, default=0)


def place_of(locator: Locator, plain: PlainRun, look: tuple[int, int]) -> Finding | None:
    """Finds what is wrong in the step that was looked at: the weights before it, a module, or a parameter.

    Args:
        locator: locator of the runs that looked there.
    """
    if look[0] > 0:
        found = _weights_before(locator, plain)
        if found is not None:
            return found
    return locator.first()


def of_loss(locator: Locator, wrong: Mapping[Number, float], step: int) -> Finding | None:
    """Returns a finding for the loss where it is wrong and each logit that it is made of is right; else None."""
    found = {number for number in wrong if number.step == step and number.kind in ("loss", "logits")}
    if {number.kind for number in found} != {"loss"} or locator.forward() is not None:
        return None
    ranks = tuple(range(len(locator.reports)))
    error = wrong[next(iter(found))]
    return replace(locator.finding_at("loss", "its value", ranks, "", OF_LOSS), error=error)


def of_norm(locator: Locator, errors: Errors, wrong: Mapping[Number, float]) -> Finding | None:
    """Returns a finding for the gradient norm where it is wrong and each gradient is right; else None."""
    number = next((number for number in sorted(wrong) if number.kind == "grad_norm"), None)
    if number is None or any(other.kind == "gradient" for other in wrong):
        return None
    ranks = tuple(rank for rank, error in sorted(errors.ranks[number].items()) if error > TOLERANCE)
    found = locator.finding_at("gradient norm", "its value", ranks, "", COUNTED)
    return replace(found, direction="backward", error=wrong[number])


def of_gradient(locator: Locator, errors: Errors, wrong: Mapping[Number, float]) -> Finding | None:
    """Returns a finding for the gradient that is furthest off, which may be small beside others; else None."""
    most = max((number for number in wrong if number.kind == "gradient"), key=wrong.__getitem__, default=None)
    if most is None:
        return None
    ranks = tuple(rank for rank, error in sorted(errors.ranks[most].items()) if error > TOLERANCE)
    return locator.gradient_of(most.name, ranks, wrong[most])


def _weights_before(locator: Locator, plain: PlainRun) -> Finding | None:
    """Finds the parameter that is furthest off before a later step."""
    errors: dict[str, dict[int, float]] = {}
    for rank, name, shard, cut in replicas(locator.reports, "before", locator.tp):
        wanted = plain.before[name]
        errors.setdefault(name, {})[rank] = difference(shard, cut(wanted), -OPTIMIZER["lr"])
    return _of_weights(locator, errors, NOTICED_IN_WEIGHTS)


def first_weight(
    locator: Locator, errors: Errors, wrong: Mapping[Number, float], plain: PlainRun
) -> Finding | None:
    """Finds the parameter or buffer that is furthest off after the steps."""
    held = {number.name: errors.ranks[number] for number in wrong if number in errors.ranks}
    found = _of_weights(locator, held, NOTICED)
    return replace(found, cause=UNUSED) if found is not None and found.where in plain.unreached else found


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
