"""What the numbers of a scheduled step say, held against the unscheduled model's."""

from __future__ import annotations

from typing import Any

from megasched.verify import bfloat16, parity
from megasched.verify.checks import Check
from megasched.verify.dropouts import wrong_masks
from megasched.verify.locate import Finding, Locator
from megasched.verify.reference import HfStep, relative
from megasched.verify.steps import Steps
from megasched.verify.trainer_run import PlanFacts, batches_of, gather

# Of the largest change of a weight. float32 rounds a weight of size 1 by 6e-8, which is 6e-5 of a change by the
# learning rate of the check, 1e-3.
STEP_TOLERANCE = 1e-3
_NAMES = {"loss": "loss", "logits": "logits", "gradient": "gradients", "grad_norm": "gradient norm"}
Judgement = tuple[list[Check], str, Finding | None]


class Judge:
    """One scheduled step, and the references that it is held against.

    Attributes:
        facts: of its plan.
    """

    def __init__(self, steps: Steps, schedule: str) -> None:
        """Runs the steps.

        Raises:
            RankError: the scheduled one was refused, or failed.
        """
        steps.progress(f"one step of Megatron's trainer at {steps.layout}")
        self.steps, self.schedule = steps, schedule
        self.reports = steps.scheduled(schedule)
        self.batches = batches_of(self.reports)
        self.facts: PlanFacts = next(report.facts for report in self.reports if report.facts is not None)
        self._of_dropouts = False
        steps.progress("the same step of the unscheduled model")
        self.expected: HfStep
        self.exact: HfStep | None = None
        if steps.bf16:
            self.expected, self.exact = steps.rounded(self.batches)
        else:
            self.expected = steps.reference(self.batches)

    def judge(self) -> Judgement:
        """Every check, what is to be said of them, and where it goes wrong first, if it does."""
        return self._judge_bf16() if self.steps.bf16 else self._judge_float32()

    def is_right(self, schedule: str) -> bool:
        """Whether another schedule is equal in what this one was found wrong in: the dropouts, or the numbers.

        Raises:
            RankError: it is refused, or fails.
        """
        tp = self.steps.layout.tp
        if self._of_dropouts:
            return self._wrong_masks(schedule) is None
        reports = self.steps.scheduled(schedule)
        if self.steps.bf16:
            assert self.exact is not None
            return all(check.equal for check in bfloat16.compare_bf16(reports, self.expected, self.exact, tp))
        return not parity.compare_step(reports, self.expected, tp, self.exact).wrong

    def _judge_bf16(self) -> Judgement:
        assert self.exact is not None
        checks = bfloat16.compare_bf16(self.reports, self.expected, self.exact, self.steps.layout.tp)
        wrong = [check.name for check in checks if not check.equal]
        if not wrong:
            return checks, "", None
        why = f"{', '.join(wrong)}: further from float64 than rounding to bf16 explains"
        return checks, why, bfloat16.first_beyond(self._locator(self.exact), self.expected)

    def _judge_float32(self) -> Judgement:
        steps, tp = self.steps, self.steps.layout.tp
        found = parity.compare_step(self.reports, self.expected, tp)
        states = self._locator(self.expected).hidden_states()
        if found.wrong or any(error > parity.TOLERANCE for error in states.values()):
            steps.progress("the same in float64, to tell rounding from mistakes")
            self.exact = steps.reference(self.batches, in_float64=True)
            found = parity.compare_step(self.reports, self.expected, tp, self.exact)
        worst = {"gradient": found.worst}
        checks = [
            Check(words, found.errors.get(name), parity.TOLERANCE, worst.get(name, ""), name not in found.wrong)
            for name, words in _NAMES.items()
        ]
        checks.insert(2, self._states(states))
        steps.progress("the optimizer's step")
        checks.append(self._optimizer())
        wrong = [check.name for check in checks if not check.equal]
        if wrong:
            why = found.why if found.wrong else f"{', '.join(wrong)}: beyond the tolerance"
            return checks, why, self._locator(self.expected).first()
        if tp == 1 or not self.facts.dropouts or not steps.can_drop_out():
            return checks, found.why, None
        steps.progress("a step with dropout, to see which numbers the ranks draw")
        finding = self._wrong_masks(self.schedule)
        checks.append(Check("dropout masks", None, 0.0, finding.where if finding else "", finding is None))
        self._of_dropouts = finding is not None
        return checks, "dropouts draw the wrong random numbers" if finding else found.why, finding

    def _locator(self, expected: HfStep) -> Locator:
        layout = self.steps.layout
        return Locator(self.reports, expected, layout.tp, layout.cp, layout.data_parallel_size, self.facts)

    def _states(self, errors: dict[Any, float]) -> Check:
        """At the boundaries of layers: the largest error that rounding does not explain, if there is one."""
        if not errors:
            return Check("hidden states", None, parity.TOLERANCE)
        beyond = {place: error for place, error in errors.items() if error > parity.TOLERANCE}
        if beyond and self.exact is not None:
            plain, truth = self._locator(self.expected), self._locator(self.exact)
            ours = truth.hidden_states()
            theirs = {place: relative(plain.wanted(*place), truth.wanted(*place)) for place in beyond}
            beyond = {
                place: e for place, e in beyond.items() if not parity.is_rounding(ours[place], theirs[place])
            }
        counted = beyond or errors
        (path, _), gradient = worst = max(counted, key=lambda place: counted[place])
        name = f"gradient at {path}" if gradient else path
        return Check("hidden states", counted[worst], parity.TOLERANCE, name, not beyond)

    def _optimizer(self) -> Check:
        """Weights after Megatron's optimizer against those after torch's, given the same gradients."""
        gradients, weights = (
            gather(self.reports, what, self.steps.layout.tp) for what in ("gradients", "weights")
        )
        errors = self.steps.optimizer_errors(gradients, weights)
        worst = max(errors, key=lambda name: errors[name])
        return Check("optimizer step", errors[worst], STEP_TOLERANCE, worst, errors[worst] <= STEP_TOLERANCE)

    def _wrong_masks(self, schedule: str) -> Finding | None:
        return wrong_masks(self._locator(self.expected), self.steps.with_dropout(schedule))
