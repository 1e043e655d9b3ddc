"""Finds the first module, forward or backward, whose numbers differ from the unscheduled model's.

It also says how they relate to the right numbers, and what usually does that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from megasched.definition.sequence_split import Zigzag
from megasched.language.tensor_types import ShardDim
from megasched.plan.placement import Placement
from megasched.verify.locate.bisect import Call
from megasched.verify.locate.diagnosis import TIPPED, likely_cause
from megasched.verify.locate.matching import COPIES, Match, match, relation, together
from megasched.verify.numbers import difference, replicas
from megasched.verify.plain.watching import Event
from megasched.verify.recording import PlanFacts, RankReport
from megasched.verify.reference import HfStep, floor_of, largest, relative
from megasched.verify.trainer_run import gather

# Beyond rounding, which grows from module to module; a fault is far beyond it.
NOTICED = 5e-5


@dataclass(frozen=True)
class Finding:
    """Describes where the numbers first differ.

    Attributes:
        direction: the pass in which they do.
        where: path of the module, or name of the parameter.
        what: the tensor of it that differs, in words.
        ranks: those that have wrong numbers.
        error: relative to the largest right value.
        relation: how the wrong numbers relate to the right ones; empty where that is not simple.
        cause: what usually does that.
        records: calls of the schedule on that module or nearest to it: path, what was asked for, file and line.
        guilty: calls without which all is right, where such were looked for and found.
        tipped: number of values that are 0 but for rounding, where they explain the whole difference.
    """

    direction: Literal["forward", "backward"]
    where: str
    what: str
    ranks: tuple[int, ...]
    error: float
    relation: str
    cause: str
    records: tuple[Call, ...] = ()
    guilty: tuple[Call, ...] = ()
    tipped: int = 0


@dataclass
class Locator:
    """Compares one run with its reference, event by event.

    Attributes:
        shares: into how many means a run divides the loss of a rank: those of DP and CP in Megatron's trainer.
        replica: the DP rank whose micro-batch was looked at.
        seen: what modules took and gave in the reference.
    """

    reports: Sequence[RankReport]
    expected: HfStep
    tp: int
    cp: int
    shares: int
    facts: PlanFacts
    replica: int = 0

    def __post_init__(self) -> None:
        assert self.expected.sightings is not None
        self.seen = self.expected.sightings
        self._floor = floor_of(self.seen.gradients)

    def first(self) -> Finding | None:
        """Returns the first difference, in the order of the computation; None where no module shows any."""
        return self.forward() or self.backward()

    def forward(self) -> Finding | None:
        for event in self.seen.order:
            found = self.compare(event, gradient=False)
            if found is not None and found.error > NOTICED:
                return self.finding("forward", event, found)
        return None

    def backward(self) -> Finding | None:
        checked: set[str] = set()
        for event in reversed(self.seen.order):
            path, kind = event
            if event in self.seen.gradients:
                found = self.compare(event, gradient=True)
                if found is not None and found.error > NOTICED:
                    return self.finding("backward", event, found)
            if kind == "out" and path not in checked:
                checked.add(path)
                finding = self._parameters_of(path)
                if finding is not None:
                    return finding
        return self._parameters_of(None)

    def hidden_states(self) -> dict[tuple[Event, bool], float]:
        """Maps (event, is gradient) to the relative error, for each layer's output and the gradient at it."""
        found = {}
        for path in self.facts.layers:
            for gradient in (False, True):
                one = self.compare((path, "out"), gradient=gradient)
                if one is not None:
                    found[(path, "out"), gradient] = one.error
        return found

    # events -----------------------------------------------------------------------------------------

    def compare(self, event: Event, *, gradient: bool) -> Match | None:
        """Returns how the ranks' tensors match; None where they can't be compared (experts, packed layouts)."""
        wanted = self.wanted(event, gradient)
        matches = []
        for rank in range(self.cp):
            parts = self._parts(event, gradient, rank)
            if wanted is None or len(parts) != self.tp:
                return None
            sums = gradient and event[0] not in self.facts.layers  # regions lie inside of layers
            components = self.facts.components.get(event[0], ())
            floor = self._floor if gradient else 0.0
            one = match(parts, self._own(wanted, rank), components=components, sums=sums, floor=floor)
            if one is None:
                return None
            matches.append(one)
        return max(matches, key=lambda one: one.error)

    def wanted(self, event: Event, gradient: bool) -> torch.Tensor | None:
        """Returns the unscheduled model's tensor for an event, in the scale of a rank; None where it has none."""
        if not gradient:
            return self.seen.values.get(event)
        found = self.seen.gradients.get(event)
        # Megatron divides a loss by the micro-batches of a rank, and gradients when it sums them over DP and CP.
        return None if found is None else found * self.shares

    def _parts(self, event: Event, gradient: bool, cp_rank: int) -> list[torch.Tensor]:
        """Returns the tensors that the replica's TP ranks saw, in rank order."""
        found = {}
        for report in self.reports:
            seen = report.sightings.gradients if gradient else report.sightings.values
            if report.dp_rank == self.replica and report.cp_rank == cp_rank and event in seen:
                found[report.tp_rank] = seen[event]
        return [found[rank] for rank in sorted(found)]

    def _own(self, wanted: torch.Tensor, cp_rank: int) -> torch.Tensor:
        """Returns a context-parallel rank's part of [b, s, ...]; a tensor without that s stays whole."""
        if self.cp == 1 or wanted.dim() < 2 or wanted.shape[1] != self.expected.logits[0].shape[1]:
            return wanted
        return Zigzag(self.cp, cp_rank).local_sequence(wanted, ShardDim(1))

    def _ranks(self, event: Event, found: Match) -> tuple[int, ...]:
        """Returns the numbers of the ranks with wrong values."""
        own = ((n, r) for n, r in enumerate(self.reports) if r.dp_rank == self.replica)
        holders = [n for n, r in own if event in r.sightings.values]
        if found.way == "whole" and len(found.errors) == len(holders):
            return tuple(n for n, error in zip(holders, found.errors, strict=True) if error > NOTICED)
        return tuple(holders)

    # findings ---------------------------------------------------------------------------------------

    def finding(self, direction: Literal["forward", "backward"], event: Event, found: Match) -> Finding:
        """Returns the finding for an event that matches in no way."""
        path, kind = event
        gradient = direction == "backward"
        wanted = self.wanted(event, gradient)
        assert wanted is not None
        parts = self._parts(event, gradient, 0)
        related = relation(parts, self._own(wanted, 0), self.facts.components.get(path, ()))
        what = {"in": "what goes into it", "out": "what it gives"}[kind]
        what = f"the gradient of {what}" if gradient else what
        tipped = self._tipped(event) if gradient else 0
        cause = likely_cause(direction, event, related, self.facts, self.seen.sources)
        cause = TIPPED.format(tipped) if tipped else cause
        ranks, calls = self._ranks(event, found), self._records(path)
        return Finding(direction, path, what, ranks, found.error, related, cause, calls, tipped=tipped)

    def _tipped(self, event: Event) -> int:
        """Returns how many values are on other sides of 0, if those are all whose gradients differ; else 0.

        The values are right to rounding, so they are nearly 0, where the slope of a ReLU jumps.
        """
        values = self.compare(event, gradient=False)
        if values is None or values.error > NOTICED:
            return 0
        count = 0
        for rank in range(self.cp):
            (mine, right), (slope, wanted) = self._both(event, False, rank), self._both(event, True, rank)
            if mine is None or slope is None or mine.shape != slope.shape:
                return 0
            off = (slope - wanted).abs() > NOTICED * largest(wanted)
            if (off & (mine.sign() == right.sign())).any():
                return 0
            count += int(off.sum())
        return count

    def _both(self, event: Event, gradient: bool, cp_rank: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Returns what a CP rank's TP ranks have together, None where that can't be told, and what is right."""
        wanted = self.wanted(event, gradient)
        assert wanted is not None  # both were compared
        own = self._own(wanted, cp_rank)
        return together(self._parts(event, gradient, cp_rank), own, self.facts.components.get(event[0], ())), own

    def finding_at(self, path: str, what: str, ranks: tuple[int, ...], related: str, cause: str) -> Finding:
        """Returns a finding in a module's forward for something wrong that has no size."""
        return Finding("forward", path, what, ranks, 1.0, related, cause, self._records(path))

    def _parameters_of(self, path: str | None) -> Finding | None:
        """Finds a module's first own parameter (of any module, for None) with a wrong gradient on any rank."""
        for name in self.expected.gradients:
            if path not in (None, name.rpartition(".")[0]) or name not in self._gradients:
                continue
            errors = self._errors[name]
            ranks = tuple(rank for rank, error in sorted(errors.items()) if not error <= NOTICED)
            if ranks:
                return self.gradient_of(name, ranks, max(errors.values()))
        return None

    def gradient_of(self, name: str, ranks: tuple[int, ...], error: float) -> Finding:
        """Returns the finding for a parameter whose gradient is wrong on these ranks."""
        whole, wanted = self._gradients[name], self.expected.gradients[name]
        path = name.rpartition(".")[0]
        held = [(n, r) for n, r in enumerate(self.reports) if r.dp_rank == 0 and name in r.gradients]
        placement = held[0][1].gradients[name][1]
        right = len(self._errors[name]) - len(ranks)
        if right:
            related = f"it is right on {right} of the {right + len(ranks)} ranks that hold it"
            cause = "what one rank does with its gradient, or a sum over ranks that not all of them take part in"
        else:
            parts = [r.gradients[name][0] for _, r in held]
            related = "" if placement.sharded else relation(parts, wanted)
            related = self._of_copies(name, placement, whole, wanted) or related
            back = self.compare((path, "out"), gradient=True)
            event, way = (path, "parameter"), back.way if back is not None else ""
            cause = likely_cause("backward", event, related, self.facts, self.seen.sources, way=way)
        what = "the gradient of this parameter"
        return Finding("backward", name, what, ranks, error, related, cause, self._records(path))

    @cached_property
    def _gradients(self) -> dict[str, torch.Tensor]:
        return gather(list(self.reports), "gradients", self.tp)

    @cached_property
    def _errors(self) -> dict[str, dict[int, float]]:
        """Maps each parameter to its gradient's error on each rank that holds it, a part or a copy."""
        found: dict[str, dict[int, float]] = {}
        floor = floor_of(self.expected.gradients)
        for rank, name, shard, cut in replicas(self.reports, "gradients", self.tp):
            if name in self.expected.gradients:
                wanted = self.expected.gradients[name]
                size = -max(largest(wanted), floor)
                found.setdefault(name, {})[rank] = difference(shard, cut(wanted), size)
        return found

    def _of_copies(self, name: str, placement: Placement, held: torch.Tensor, wanted: torch.Tensor) -> str:
        """Returns ``COPIES`` if the gradient of a tie is right once its copies' are added up; else empty."""
        copies = {r.tp_rank: r.copies[name] for r in self.reports if name in r.copies and r.dp_rank == 0}
        if not copies:
            return ""
        total = held + placement.unshard([copies[rank] for rank in sorted(copies)])
        return COPIES if relative(total, wanted) < NOTICED else ""

    def _records(self, path: str) -> tuple[Call, ...]:
        """Returns the calls on the module; else below it or on takers of its output; else on parents."""
        takers = [taker for taker, source in self.seen.sources.items() if source == path]
        near = [f"{one}." for one in (path, *takers)]
        around = [path[:end] for end in range(len(path)) if path[end] == "."][::-1]
        for chosen in (
            lambda at: at == path,
            lambda at: at in takers or any(at.startswith(one) for one in near),
            *((lambda at, one=one: at == one) for one in around),
        ):
            found = [record for record in self.facts.records if chosen(record[0])]
            if found:
                return tuple(found[:4])
        return ()
