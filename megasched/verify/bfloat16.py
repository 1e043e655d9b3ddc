"""Decides what is equal in bf16: no further from float64 than plain HF in bf16 is, but for a small factor.

All runs start from the same weights, rounded to bf16, so that arithmetic alone is compared. An error is the norm
of a difference over the norm of the float64 result. The factors must allow for:

- On one rank, the order of sums: joined columns, fused norms and Megatron's layers round elsewhere than HF does.
- Under TP, one more rounding for each row: a rank's part of the product is rounded to bf16 before the parts are
  added, and under SP so is each gradient that is gathered or scattered.
- A single parameter's error is a sample of few numbers (a norm of 32), all gradients together one of 10^4.
- The loss is a mean in which errors cancel; how far is luck. So it is held to a sixteenth of bf16's rounding, too.
- The gradient norm is off by the part of the gradients' error that lies along the gradients, which is luck as well
  (a thirteenth of it was measured). So it is held to an eighth of what all gradients together may be off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megasched.verify.locate.locate import Finding, Locator
from megasched.verify.numbers import Check
from megasched.verify.recording import RankReport
from megasched.verify.reference import FLOOR, HfStep, furthest, relative
from megasched.verify.trainer_run import gather, logits_of, losses

UNIT = 2.0**-8  # half of bf16's spacing at 1
# Beyond what plain HF has at the same place, and beyond what one rounding more or less does.
NOTICED = 8.0


@dataclass(frozen=True)
class Factors:
    """Limits the errors of logits, of all gradients together and of a single one to multiples of plain HF's."""

    logits: float
    gradients: float
    single: float


# Largest measured, by tests/parity/test_bf16.py: 1.00, 1.06, 1.24 on one rank; 1.10, 1.20, 1.56 at TP2 with SP.
ONE_RANK = Factors(logits=1.05, gradients=1.25, single=1.5)
TENSOR_PARALLEL = Factors(logits=1.25, gradients=1.5, single=2.0)


def compare_bf16(reports: list[RankReport], plain: HfStep, exact: HfStep, tp: int) -> list[Check]:
    """Compares a run in bf16 with float64; tolerances are multiples of plain HF's own error.

    Args:
        plain, exact: the step of plain HF in bf16 and in float64.
    """
    factors = TENSOR_PARALLEL if tp > 1 else ONE_RANK
    gradients = gather(reports, "gradients", tp)
    norm = furthest((report.grad_norms[0] for report in reports), exact.grad_norm)
    checks = [_number("loss", losses(reports)[0], plain.loss, exact.loss, UNIT / 16)]
    error, theirs = _error(logits_of(reports), exact.logits), _error(plain.logits, exact.logits)
    checks.append(_check("logits", error, theirs, factors.logits))
    whole = _together(exact.gradients)
    error, theirs = _error(_together(gradients), whole), _error(_together(plain.gradients), whole)
    together = _check("gradients together", error, theirs, factors.gradients)
    checks.append(together)
    checks.append(_worst_gradient(gradients, plain, exact, factors.single))
    checks.append(_number("gradient norm", norm, plain.grad_norm, exact.grad_norm, together.tolerance / 8))
    return checks


def _worst_gradient(gradients: Mapping[str, torch.Tensor], plain: HfStep, exact: HfStep, factor: float) -> Check:
    """Returns the check of the gradient that is nearest to its limit, or furthest beyond it.

    Where plain HF is off by more than the gradient's size, it is zero but for rounding (a key's bias), and how far
    two sums of roundings lie apart is luck: it is held to a rounding of a hundredth of the largest gradient, too.
    """
    largest = max(float(wanted.norm()) for wanted in exact.gradients.values())
    found = {}
    for name, wanted in exact.gradients.items():
        size, theirs = float(wanted.norm()), float((plain.gradients[name].double() - wanted).norm())
        ours = float((gradients[name].double() - wanted).norm())
        at_least = 0.0
        if theirs > size:
            size, at_least = FLOOR * largest, UNIT
        if size:
            limit = max(factor * theirs / size, at_least)
            found[name] = Check("each gradient", ours / size, limit, name, ours / size <= limit)
    return max(found.values(), key=lambda check: (check.error or 0.0) / max(check.tolerance, 1e-30))


def first_beyond(locator: Locator, plain: HfStep) -> Finding | None:
    """Finds the first module in the forward that is far further from float64 than plain HF in bf16; else None.

    Args:
        locator: locator of the run, which expects the float64 step.
    """
    seen, theirs = locator.seen, plain.sightings
    assert theirs is not None
    for event in seen.order:
        found = locator.compare(event, gradient=False)
        if found is None or event not in theirs.values:
            continue
        yardstick = max(relative(theirs.values[event].double(), seen.values[event].double()), UNIT / 2)
        if found.error > NOTICED * yardstick:
            return locator.finding("forward", event, found)
    return None


def _check(name: str, error: float, plain: float, factor: float) -> Check:
    return Check(name, error, factor * plain, equal=error <= factor * plain)


def _number(name: str, got: float, plain: float, exact: float, at_least: float) -> Check:
    error, limit = abs(got / exact - 1), max(at_least, abs(plain / exact - 1))
    return Check(name, error, limit, equal=error <= limit)


def _error(got: torch.Tensor | Sequence[torch.Tensor], exact: torch.Tensor | Sequence[torch.Tensor]) -> float:
    got, exact = (x if isinstance(x, torch.Tensor) else torch.cat(list(x)) for x in (got, exact))
    return float((got.double() - exact).norm() / exact.norm())


def _together(gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradients[name].double().flatten() for name in sorted(gradients)])
