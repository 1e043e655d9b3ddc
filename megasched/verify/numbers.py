"""Compares every number of a run with the plain model's: each step and parameter, on each rank that holds it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from megasched.verify.parity import MOST_ROUNDING, TOLERANCE
from megasched.verify.plain.runs import PlainRun
from megasched.verify.recording import RankReport
from megasched.verify.reference import FLOOR, apart, largest, largest_finite, largest_of, off_by, relative
from megasched.verify.trainer_run import logits_of

# Of the largest gradient: the least size that an error of one is relative to. A gradient whose terms cancel (a
# key's bias) is noise of another size than its own; what is noise, float64 tells.
LEAST = 1e-7
# What is compared; a gradient is of the step that was looked at, weights and buffers are those after the last one.
KINDS = ("loss", "output", "logits", "gradient", "grad_norm", "weight", "buffer", "validation")


@dataclass
class Check:
    """Describes the result of one comparison.

    Attributes:
        name: name of the compared number, e.g. ``logits``.
        error: largest relative error; None where it is not a matter of size.
        tolerance: limit of the error.
        worst: name or place of the largest error.
        equal: whether it is within the tolerance, or no further from float64 than rounding explains.
    """

    name: str
    error: float | None
    tolerance: float
    worst: str = ""
    equal: bool = True


@dataclass(frozen=True, order=True)
class Number:
    """Identifies one number or tensor that both sides have.

    Attributes:
        kind: one of ``KINDS``.
        step: step that it belongs to; -1 for values after the last step.
        name: name of the parameter, buffer or output; place of the micro-batch for logits; else empty.
    """

    kind: str
    step: int = -1
    name: str = ""


VALIDATION = Number("validation")


@dataclass
class Errors:
    """Holds how far a run is from the plain model.

    Attributes:
        largest: number -> its largest relative error.
        ranks: number that ranks hold by themselves -> rank -> its error there.
        missing: names that are on one side alone.
        passed_over: names of buffers that one side alone has, or that the sides have in other shapes.
        roundings: gradient that is small beside the largest -> what rounding may explain of it at most.
    """

    largest: dict[Number, float] = field(default_factory=dict)
    ranks: dict[Number, dict[int, float]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    passed_over: set[str] = field(default_factory=set)
    roundings: dict[Number, float] = field(default_factory=dict)

    def add(self, number: Number, error: float, rank: int | None = None) -> None:
        error = math.inf if math.isnan(error) else error
        self.largest[number] = max(error, self.largest.get(number, 0.0))
        if rank is not None:
            of_ranks = self.ranks.setdefault(number, {})
            of_ranks[rank] = max(error, of_ranks.get(rank, 0.0))

    def of(self, kind: str) -> dict[Number, float]:
        return {number: error for number, error in self.largest.items() if number.kind == kind}


def errors_of(reports: Sequence[RankReport], run: PlainRun, tp: int) -> Errors:
    """Returns the errors of a run; both it and the plain one were looked at in the first step."""
    found = Errors()
    held = list(reports)
    losses = [report.losses for report in held if report.losses]
    for step, wanted in enumerate(run.losses):
        for of_rank in losses:
            found.add(Number("loss", step), off_by(of_rank[step], wanted))
        for rank, report in enumerate(held):
            found.add(Number("grad_norm", step), off_by(report.grad_norms[step], run.grad_norms[step]), rank)
        _add_logits(found, step, logits_of(held, step), run.logits[step])
    for report in held:
        if report.validation is not None and run.validation is not None:
            found.add(VALIDATION, off_by(report.validation, run.validation))
    add_gradients(found, held, run.gradients, tp)
    add_replicas(found, "weight", -1, held, run.weights, tp, lambda name: -max(run.changes[name], 1e-5))
    for rank, report in enumerate(held):
        for name, (value, placement) in report.buffers.items():
            whole = run.buffers.get(name)
            part = whole if whole is None or placement is None else placement.shard(whole, report.tp_rank, tp)
            if part is not None and part.shape == value.shape:
                found.add(Number("buffer", name=name), difference(value, part), rank)
            else:
                found.passed_over.add(name)
    found.passed_over |= run.buffers.keys() - {number.name for number in found.of("buffer")}
    return found


def own_errors(plain: PlainRun, exact: PlainRun) -> Errors:
    """Returns how far the plain model in float32 is from itself in float64."""
    found = Errors()
    for step, loss in enumerate(plain.losses):
        found.add(Number("loss", step), off_by(loss, exact.losses[step]))
    for step, norm in enumerate(plain.grad_norms):
        found.add(Number("grad_norm", step), off_by(norm, exact.grad_norms[step]))
    for step, logits in enumerate(plain.logits):
        _add_logits(found, step, logits, exact.logits[step])
    if plain.validation is not None and exact.validation is not None:
        found.add(VALIDATION, off_by(plain.validation, exact.validation))
    floor = LEAST * largest_of(exact.gradients)
    for name, wanted in exact.gradients.items():
        found.add(Number("gradient", 0, name), difference(plain.gradients[name], wanted, floor))
    for name, wanted in exact.weights.items():
        scale = -max(exact.changes[name], 1e-5)
        found.add(Number("weight", name=name), difference(plain.weights[name], wanted, scale))
    for name, wanted in exact.buffers.items():
        found.add(Number("buffer", name=name), difference(plain.buffers[name], wanted))
    return found


def difference(got: torch.Tensor, wanted: torch.Tensor, scale: float = 0.0) -> float:
    """Returns the largest difference relative to the largest value wanted; infinity where shapes differ.

    It is relative to ``scale`` where that is larger, and to ``-scale`` alone where that is positive.
    """
    if got.shape != wanted.shape:
        return math.inf
    got, wanted = got.double(), wanted.double()
    if scale >= 0:
        return relative(got, wanted, scale)
    return apart(got, wanted) / -scale


def replicas(reports: Sequence[RankReport], what: str, tp: int) -> Iterator[tuple[int, str, torch.Tensor, Cut]]:
    """Yields each part of a parameter that a rank holds: the rank's number, name, part, and what cuts the part.

    Args:
        what: ``gradients``, ``weights`` or ``before``.
    """
    ep = 1 + max(report.ep_rank for report in reports)
    copies = {"gradients": "copies", "weights": "weight_copies"}.get(what)
    placements = {name: held for report in reports for name, (_, held) in getattr(report, what).items()}
    for number, report in enumerate(reports):
        own = {name: shard for name, (shard, _) in getattr(report, what).items()}
        for held in (own, getattr(report, copies) if copies else {}):
            for name, shard in held.items():
                placement = placements[name]
                expert = placement.group == "ep"
                rank, size = (report.ep_rank, ep) if expert else (report.tp_rank, tp)
                yield number, name, shard, partial(placement.shard, rank=rank, size=size)


type Cut = Callable[[torch.Tensor], torch.Tensor]


def add_gradients(
    found: Errors, reports: Sequence[RankReport], wanted: Mapping[str, torch.Tensor], tp: int
) -> None:
    """Adds how far each rank's part of gradients is off, relative to the gradient of that parameter.

    Args:
        wanted: name -> the whole gradient.
    """
    most = largest_of(wanted)
    add_replicas(found, "gradient", 0, reports, wanted, tp, lambda name: LEAST * most)
    for name, gradient in wanted.items():
        rounding = TOLERANCE * FLOOR * most / max(largest(gradient), LEAST * most, 1e-30)
        if rounding > MOST_ROUNDING:
            found.roundings[Number("gradient", 0, name)] = rounding


def add_replicas(
    found: Errors,
    kind: str,
    step: int,
    reports: Sequence[RankReport],
    wanted: Mapping[str, torch.Tensor],
    tp: int,
    scale: Callable[[str], float],
) -> None:
    """Adds how far each rank's part of tensors is off, relative to the whole tensor's size.

    Args:
        kind: one of ``KINDS``; the reports have the parts by its plural.
        wanted: name -> the whole tensor.
        scale: least size that an error is relative to; a negative one is the size itself.
    """
    met = set()
    for rank, name, shard, cut in replicas(reports, f"{kind}s", tp):
        met.add(name)
        if name not in wanted:
            continue
        whole = max(largest_finite(wanted[name]), 1e-30)
        floor = scale(name)
        # Of the whole tensor's size: a part may hold small values alone.
        size = floor if floor < 0 else -max(whole, floor)
        found.add(Number(kind, step, name), difference(shard, cut(wanted[name]), size), rank)
    found.missing += sorted(met ^ wanted.keys())


def _add_logits(found: Errors, step: int, got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    if got and wanted and len(got) % len(wanted) == 0:
        got = got[:: len(got) // len(wanted)]  # a forward may ask for several losses; its output has the first
    if len(got) != len(wanted):
        found.missing.append(f"logits of step {step}")
        return
    for place, (mine, right) in enumerate(zip(got, wanted, strict=True)):
        found.add(Number("logits", step, str(place)), difference(mine, right))
