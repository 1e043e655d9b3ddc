"""Compares the numbers of a scheduled run with those of plain transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from megasched.errors import some_of
from megasched.verify import bfloat16, parity
from megasched.verify.locate.dropout_masks import wrong_masks
from megasched.verify.locate.locate import Finding, Locator
from megasched.verify.locate.place import first_weight, first_wrong, of_gradient, of_loss, of_norm, place_of
from megasched.verify.numbers import VALIDATION, Check, Errors, Number, difference, errors_of, own_errors
from megasched.verify.parity import refusal_of
from megasched.verify.plain.draws import NOTE
from megasched.verify.plain.runs import PlainRun
from megasched.verify.ranks.pool import RankError
from megasched.verify.recording import PlanFacts, RankReport
from megasched.verify.reference import DRAWS, HfStep
from megasched.verify.steps import FIRST, Look, Steps

# Of the largest change of a weight. float32 rounds a weight of size 1 by 6e-8, which is 6e-5 of a change by the
# learning rate of the check, 1e-3.
STEP_TOLERANCE = 1e-3
# Weights and buffers may be so far from float64 by rounding: steps of Adam make small gradients large.
MOST_ROUNDING_OF_STEPS = 1e-2
NAMED = 4
_ROWS = {
    "loss": "loss",
    "output": "outputs",
    "logits": "logits",
    "gradient": "gradients",
    "grad_norm": "gradient norm",
    "weight": "weights",
    "buffer": "buffers",
    "validation": "validation loss",
}
Judgement = tuple[list[Check], str, Finding | None]


class StepComparison:
    """Compares one scheduled run with its references.

    Attributes:
        facts: facts of the run's plan.
        notes: remarks: parameters without gradient, dropouts that the reference switched off, and buffers that are
            not compared.
    """

    def __init__(self, steps: Steps, schedule: str) -> None:
        """Runs the steps, scheduled and plain.

        Raises:
            RankError: the scheduled ones were refused, or failed.
            PlainError: the plain ones failed.
        """
        steps.progress(f"{steps.batches.steps} steps of Megatron's trainer at {steps.layout}")
        self.steps, self.schedule = steps, schedule
        self.reports = steps.scheduled(schedule)
        self.facts: PlanFacts = next(report.facts for report in self.reports if report.facts is not None)
        self._of_dropouts = False
        steps.progress("the same steps of the unscheduled model")
        dtype = "bfloat16" if steps.bf16 else "float32"
        self.plain = steps.reference(FIRST, dtype, rounded=steps.bf16)
        self.exact = steps.reference(FIRST, "float64", rounded=True) if steps.bf16 else None
        self.notes = _notes(self.plain)

    def judge(self) -> Judgement:
        """Returns every check, a remark on them, and the first place that goes wrong, or None."""
        return self._judge_bf16() if self.steps.bf16 else self._judge_float32()

    def is_right(self, schedule: str) -> bool:
        """Returns whether another schedule passes the checks that this one failed: the dropouts, or the numbers.

        Raises:
            RankError: it is refused, or fails.
        """
        tp = self.steps.layout.tp
        if self._of_dropouts:
            return self._wrong_masks(schedule) is None
        reports = self.steps.scheduled(schedule)
        if self.exact is not None:
            checks = bfloat16.compare_bf16(reports, first_step(self.plain), first_step(self.exact), tp)
            return all(check.equal for check in checks)
        errors = errors_of(reports, self.plain, tp)
        return not errors.missing and not self._explained(errors, reports)[0]

    def _judge_bf16(self) -> Judgement:
        assert self.exact is not None
        plain, exact = first_step(self.plain), first_step(self.exact)
        checks = bfloat16.compare_bf16(self.reports, plain, exact, self.steps.layout.tp)
        wrong = [check.name for check in checks if not check.equal]
        if not wrong:
            return checks, "", None
        why = f"{', '.join(wrong)}: further from float64 than rounding to bf16 explains"
        return checks, why, bfloat16.first_beyond(self._locator(self.reports, exact, FIRST), plain)

    def _judge_float32(self) -> Judgement:
        steps, tp = self.steps, self.steps.layout.tp
        errors = errors_of(self.reports, self.plain, tp)
        if errors.passed_over:
            self.notes.append(f"buffers that are not compared: {some_of(sorted(errors.passed_over))}")
        states = self._locator(self.reports, first_step(self.plain), FIRST).hidden_states()
        wrong, note = self._explained(errors, self.reports)
        wrong_states = self._wrong_states(states)
        checks = checks_of(errors, wrong)
        checks.insert(2, _check_of_states(states, wrong_states))
        if errors.missing:
            few = ", ".join(errors.missing[:NAMED])
            return checks, f"not on both sides: {few}", self._missing(errors.missing[0])
        if wrong or wrong_states:
            finding = self._find(errors, wrong, bool(wrong_states))
            return checks, why_wrong(wrong, wrong_states), finding
        if tp == 1 or not self.facts.dropouts or not steps.can_drop_out():
            return checks, note, None
        steps.progress("a step with dropout, to see which numbers the ranks draw")
        try:
            finding = self._wrong_masks(self.schedule)
        except RankError as error:
            refusal = refusal_of(str(error))
            if steps.subject.drops_out or not refusal:
                raise
            return checks, f"with a dropout above 0 a run of it is refused: {refusal}", None
        checks.append(Check("dropout masks", None, 0.0, finding.where if finding else "", finding is None))
        self._of_dropouts = finding is not None
        return checks, "dropouts draw the wrong random numbers" if finding else note, finding

    # what is wrong ----------------------------------------------------------------------------------

    def _explained(self, errors: Errors, reports: list[RankReport]) -> tuple[dict[Number, float], str]:
        """Returns the errors that rounding does not explain, and a note on the largest beyond the tolerance."""

        def against_exact() -> tuple[Errors, Iterator[Errors]]:
            self.steps.progress("the same in float64, to tell rounding from mistakes")
            ours = errors_of(reports, self.steps.reference(FIRST, "float64"), self.steps.layout.tp)
            return ours, (own_errors(*pair) for pair in self._draws())

        return unexplained(errors, against_exact)

    def _draws(self) -> Iterator[tuple[PlainRun, PlainRun]]:
        """Yields the unscheduled run in float32 and in float64, then the same with weights off by a rounding."""
        for draw in range(DRAWS):
            yield self.steps.reference(FIRST, draw=draw), self.steps.reference(FIRST, "float64", draw=draw)

    def _wrong_states(self, states: dict[Any, float]) -> dict[Any, float]:
        """Returns the errors at the boundaries of layers that rounding does not explain."""
        beyond = {place: error for place, error in states.items() if not error <= parity.TOLERANCE}
        if not beyond:
            return {}
        exact = self._locator(self.reports, first_step(self.steps.reference(FIRST, "float64")), FIRST)
        return _beyond_rounding(
            beyond,
            exact.hidden_states(),
            (self._own_states(beyond, *pair) for pair in self._draws()),
            lambda place, ours, theirs: parity.is_rounding(ours, theirs),
        )[0]

    def _own_states(self, places: Iterable[Any], *pair: PlainRun) -> dict[Any, float]:
        """Returns the errors of the unscheduled run at boundaries of layers against another such run."""
        plain, exact = (self._locator(self.reports, first_step(run), FIRST) for run in pair)
        return {place: difference(plain.wanted(*place), exact.wanted(*place)) for place in places}

    # where ------------------------------------------------------------------------------------------

    def _find(self, errors: Errors, wrong: dict[Number, float], states: bool) -> Finding | None:
        """Finds where the run goes wrong first; runs the steps again to watch any but the first micro-batch."""
        if wrong.keys() == {VALIDATION} and not states:
            return None  # no module was watched in it
        look = first_wrong(wrong, states)
        if look is None:
            locator = self._locator(self.reports, first_step(self.plain), FIRST)
            return first_weight(locator, errors, wrong, self.plain)
        reports, plain = self.reports, self.plain
        if look != FIRST:
            self.steps.progress(f"again, to look at micro-batch {look[1] + 1} of step {look[0] + 1}")
            reports, plain = self.steps.scheduled(self.schedule, look), self.steps.reference(look)
        locator = self._locator(reports, step_of(plain, look), look)
        found = of_loss(locator, wrong, look[0]) or place_of(locator, plain, look)
        return found or of_norm(locator, errors, wrong) or of_gradient(locator, errors, wrong)

    def _missing(self, name: str) -> Finding | None:
        what, ranks = "it is not on both sides and", tuple(range(len(self.reports)))
        return self._locator(self.reports, first_step(self.plain), FIRST).finding_at(name, what, ranks, "", "")

    def _locator(self, reports: list[RankReport], expected: HfStep, look: Look) -> Locator:
        layout = self.steps.layout
        dp = layout.data_parallel_size
        replica = look[1] * dp // self.steps.batches.micro_batches
        return Locator(reports, expected, layout.tp, layout.cp, dp * layout.cp, self.facts, replica)

    def _wrong_masks(self, schedule: str) -> Finding | None:
        locator = self._locator(self.reports, first_step(self.plain), FIRST)
        return wrong_masks(locator, self.steps.with_dropout(schedule))


def unexplained(
    errors: Errors, against_exact: Callable[[], tuple[Errors, Iterator[Errors]]]
) -> tuple[dict[Number, float], str]:
    """Returns the errors that rounding does not explain, and a note on the largest beyond the tolerance.

    Args:
        against_exact: makes the errors of the run against float64, if needed, and after it those of the
            unscheduled model, one draw of its roundings after another; the largest count.
    """
    beyond = {n: error for n, error in errors.largest.items() if not error <= _tolerance(n)}
    if not beyond:
        return {}, ""
    ours, draws = against_exact()
    is_rounding = partial(_is_rounding, ours.roundings)
    wrong, theirs = _beyond_rounding(beyond, ours.largest, (own.largest for own in draws), is_rounding)
    most = max(beyond, key=lambda number: beyond[number])
    note = f"{most.name or most.kind} differs by {beyond[most]:.1e}; from float64 it is "
    note += f"{ours.largest[most]:.1e}, and the unscheduled model's {theirs[most]:.1e}"
    return wrong, note


def _beyond_rounding[K: Hashable](
    beyond: dict[K, float],
    ours: Mapping[K, float],
    draws: Iterable[Mapping[K, float]],
    is_rounding: Callable[[K, float, float], bool],
) -> tuple[dict[K, float], dict[K, float]]:
    """Returns the errors that rounding does not explain, and the unscheduled model's, the largest of its draws.

    Args:
        beyond: errors beyond the tolerance.
        ours: errors against float64.
        draws: those of the unscheduled model; made one by one, as long as rounding may explain what is left.
        is_rounding: whether it explains an error of ours, given the unscheduled model's.
    """
    wrong, theirs = beyond, dict.fromkeys(beyond, 0.0)
    for own in draws:
        theirs = {one: max(error, own[one]) for one, error in theirs.items()}
        wrong = {one: error for one, error in wrong.items() if not is_rounding(one, ours[one], theirs[one])}
        if not wrong or not all(is_rounding(one, ours[one], math.inf) for one in wrong):
            break
    return wrong, theirs


def checks_of(errors: Errors, wrong: dict[Number, float]) -> list[Check]:
    """Returns the check of each kind of number that there is."""
    return [_check(kind, errors, wrong) for kind in _ROWS if errors.of(kind)]


def step_of(run: PlainRun, look: Look) -> HfStep:
    """Returns the step that was looked at as an ``HfStep``."""
    step = look[0]
    return HfStep(run.losses[step], run.logits[step], run.gradients, run.grad_norms[step], run.sightings)


def first_step(run: PlainRun) -> HfStep:
    """Returns the first step as an ``HfStep``, of a run that was looked at there."""
    return step_of(run, FIRST)


def _tolerance(number: Number) -> float:
    return STEP_TOLERANCE if number.kind == "weight" else parity.TOLERANCE


def _is_rounding(roundings: Mapping[Number, float], number: Number, ours: float, theirs: float) -> bool:
    most = parity.MOST_ROUNDING if number.step == 0 else MOST_ROUNDING_OF_STEPS
    return ours <= min(parity.ROUNDING * theirs, max(most, roundings.get(number, 0.0)))


def _check(kind: str, errors: Errors, wrong: dict[Number, float]) -> Check:
    of_kind = errors.of(kind)
    # A small gradient that is noise on both sides says nothing of the others; where it is more, it is wrong.
    held = {n: error for n, error in of_kind.items() if error <= _tolerance(n) or n not in errors.roundings}
    held = held or of_kind
    counted = {number: error for number, error in wrong.items() if number.kind == kind} or held
    most = max(counted, key=lambda number: counted[number])
    where = most.name if kind in ("output", "gradient", "weight", "buffer") else ""
    where = f"step {most.step + 1}" if not where and counted is not held else where
    return Check(_ROWS[kind], counted[most], _tolerance(most), where, counted is held)


def _check_of_states(states: dict[Any, float], wrong: dict[Any, float]) -> Check:
    counted = wrong or states
    if not counted:
        return Check("hidden states", None, parity.TOLERANCE)
    (path, _), gradient = worst = max(counted, key=lambda place: counted[place])
    return Check(
        "hidden states", counted[worst], parity.TOLERANCE, f"gradient at {path}" if gradient else path, not wrong
    )


def why_wrong(wrong: dict[Number, float], states: dict[Any, float]) -> str:
    """Returns in words which numbers are wrong.

    Args:
        states: wrong boundaries of layers.
    """
    kinds = [words for kind, words in _ROWS.items() if any(number.kind == kind for number in wrong)]
    kinds += ["hidden states"] if states and not kinds else []
    why = f"{', '.join(kinds)}: beyond the tolerance"
    names = sorted({number.name for number in wrong if number.kind == "gradient"})
    few = f"{', '.join(names[:NAMED])}{' ...' if len(names) > NAMED else ''}"
    why += f"; gradients of {few}" if names else ""
    later = [number.step for number in wrong if number.step >= 0]
    return why + (f"; from step {min(later) + 1} on" if later and min(later) > 0 else "")


def _notes(plain: PlainRun) -> list[str]:
    found = []
    for what, names in (
        ("no gradient reached", plain.unreached),
        ("dropouts that stand in the code are off on both sides:", plain.silenced),
    ):
        few = f"{', '.join(names[:NAMED])}{f' and {len(names) - NAMED} more' if len(names) > NAMED else ''}"
        found += [f"{what} {few}"] if names else []
    return found + ([NOTE] if plain.drawn else [])
