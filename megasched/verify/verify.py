"""``megasched verify``: a schedule at a layout against the unscheduled model, number by number."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megasched.certificate import subject_of, write_certificate
from megasched.definition import load_config
from megasched.errors import ConfigError
from megasched.layout import Layout
from megasched.verify.shrink import LAYERS, TOKENS

if TYPE_CHECKING:
    from megasched.verify.locate import Finding
    from megasched.verify.parity import Comparison
    from megasched.verify.rank_pool import RankPool
    from megasched.verify.reference import HfStep
    from megasched.verify.trainer_run import RankReport

# Of the largest change of a weight. float32 rounds a weight of size 1 by 6e-8, which is 6e-5 of a change by the
# learning rate of the check, 1e-3.
STEP_TOLERANCE = 1e-3
LEARNING_RATE, EPSILON = 1e-3, 1e-5  # as trainer_run.RUN_FLAGS has them
MOST_RANKS = 16
SEED = 1234


@dataclass
class Check:
    """One thing that was compared.

    Attributes:
        name: what.
        error: the largest, relative; None where it could not be compared.
        tolerance: that it had to be within.
        worst: where it was largest.
        equal: whether it is within the tolerance, or no further from float64 than rounding explains.
    """

    name: str
    error: float | None
    tolerance: float
    worst: str = ""
    equal: bool = True


@dataclass
class Verification:
    """What was found.

    Attributes:
        model: class of the definition.
        small: whether a small copy stood for the model.
        layers: that the model had.
        verdict: as an ``Outcome`` has it.
        why: of what is not equal; and of what is so but for rounding.
        finding: where it goes wrong, if it does and the place was found.
    """

    schedule: str
    hf_model: str
    layout: Layout
    model: str
    small: bool
    layers: int
    verdict: Literal["equal", "wrong", "refused", "failed"]
    why: str = ""
    checks: list[Check] = field(default_factory=list)
    finding: Finding | None = None
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        return self.verdict == "equal"

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self)
        found["layout"] = str(self.layout)
        return found


def verify_schedule(
    schedule: str,
    hf_model: str,
    layout: Layout,
    *,
    full_size: bool = False,
    layers: int | None = None,
    overrides: Sequence[str] = (),
    trust_remote_code: bool = False,
    ranks: RankPool | None = None,
    timeout: float = 600,
    progress: Callable[[str], None] = lambda doing: None,
) -> Verification:
    """One step of Megatron's trainer under a schedule against plain torch, in float32, rehearsed on CPUs.

    Compared are loss, logits, what leaves each layer and the gradient that comes back to it, every gradient, the
    gradient norm, and every weight after the optimizer's step.

    Args:
        schedule: what ``--model-schedule`` says.
        hf_model: folder, config file or hub id.
        full_size: take the model as it is, with its weights where the folder has some; otherwise a small copy
            of the same structure, with random ones.
        layers: of the small copy; 4, or as many as there are stages, by default.
        overrides: ``key=value`` for the HF config.
        trust_remote_code: run Python code that comes with the model.
        ranks: processes to run it on; own ones by default.
        timeout: seconds for each of the two runs.
        progress: told what is being done.

    Raises:
        ConfigError: too many ranks for one machine, or no small copy can be made.
    """
    from megasched.verify.rank_pool import RankPool

    _check_size(layout)
    started = time.monotonic()
    file, colon, name = schedule.partition(":")
    path = f"{Path(file).resolve()}{colon}{name}" if file.endswith(".py") else schedule
    with tempfile.TemporaryDirectory(prefix="verify") as folder:
        model = Path(folder) / "model"
        subject = _subject(
            hf_model, model, layout, full_size, layers, overrides=overrides, trust_remote_code=trust_remote_code
        )
        found = Verification(schedule, hf_model, layout, subject.model, not full_size, subject.layers, "equal")
        with nullcontext(ranks) if ranks is not None else RankPool(MOST_RANKS) as pool:
            _Run(pool, subject, path, layout, timeout, progress).fill(found)
    found.why = found.why.replace(str(model), "DIR")
    if found.finding is not None:
        here = f"({os.getcwd()}{os.sep}"
        records = tuple(record.replace(here, "(") for record in found.finding.records)
        found.finding = replace(found.finding, records=records)
    found.seconds = round(time.monotonic() - started, 1)
    return found


def certify(
    found: Verification, path: Path, *, overrides: Sequence[str] = (), trust_remote_code: bool = False
) -> None:
    """Writes what was found as a certificate, whatever it says.

    Raises:
        ConfigError: it can't be written.
    """
    config = load_config(found.hf_model, overrides, trust_remote_code=trust_remote_code)
    write_certificate(path, subject_of(found.schedule, config, found.layout), found.to_dict())


def _check_size(layout: Layout) -> None:
    if layout.world_size > MOST_RANKS:
        raise ConfigError(
            f"{layout} takes {layout.world_size} processes, and at most {MOST_RANKS} are started on one machine. "
            "What can go wrong goes wrong at 2 of each kind, too: e.g. --tp 2 --pp 2"
        )


@dataclass(frozen=True)
class _Subject:
    """What stands for the model: a folder with config and perhaps weights."""

    folder: str
    model: str
    layers: int
    vocabulary: int
    tokens: tuple[int, int] | None
    random_init: bool
    trust_remote_code: bool


def _subject(
    hf_model: str,
    target: Path,
    layout: Layout,
    full_size: bool,
    layers: int | None,
    *,
    overrides: Sequence[str],
    trust_remote_code: bool,
) -> _Subject:
    from megasched.verify.small_models import copy_code, small_copy, write_model

    config = load_config(hf_model, overrides, trust_remote_code=trust_remote_code)
    if full_size:
        if overrides:
            raise ConfigError("--hf-override changes a small copy; for --full-size change config.json itself")
        text = config.get_text_config(decoder=True)
        kept = any(Path(hf_model).glob("*.safetensors"))
        depth = int(getattr(text, "num_hidden_layers", 0))
        name = type(config).__name__.removesuffix("Config")
        return _Subject(hf_model, name, depth, text.vocab_size, None, not kept, trust_remote_code)
    depth = layers or max(LAYERS, math.lcm(layout.pp * layout.vpp, 1))
    small = small_copy(config, layers=depth)
    target.mkdir()
    copy_code(hf_model, target, trust_remote_code)
    write_model(small, target, trust_remote_code=trust_remote_code)
    text = small.get_text_config(decoder=True)
    name = type(config).__name__.removesuffix("Config")
    return _Subject(str(target), name, depth, text.vocab_size, TOKENS, False, trust_remote_code)


@dataclass
class _Run:
    pool: RankPool
    subject: _Subject
    schedule: str
    layout: Layout
    timeout: float
    progress: Callable[[str], None]

    def fill(self, found: Verification) -> None:
        from megasched.verify.parity import failure
        from megasched.verify.rank_pool import RankError
        from megasched.verify.trainer_run import batches_of

        try:
            self.progress(f"one step of Megatron's trainer at {self.layout}")
            reports = self._scheduled()
            self.progress("the same step of the unscheduled model")
            batches = batches_of(reports)
            expected = self._reference(batches)
        except RankError as error:
            outcome = failure(str(error))
            found.verdict, found.why = outcome.verdict, outcome.why  # type: ignore[assignment]
            if outcome.verdict == "refused" and found.small:
                found.why += f"; the copy has {found.layers} layers, --layers gives it more"
            return
        self._judge(found, reports, expected, batches)

    def _scheduled(self) -> list[RankReport]:
        from megasched.verify import trainer_run

        subject = self.subject
        flags = [*self.layout.flags(), "--vocab-size", str(subject.vocabulary)]
        flags += ["--trust-remote-code"] if subject.trust_remote_code else []
        return self.pool.run(
            self.layout.world_size,
            trainer_run.train,
            subject.folder,
            flags,
            iterations=1,
            schedule=self.schedule,
            random_init=subject.random_init,
            tokens=subject.tokens,
            watch=True,
            timeout=self.timeout,
        )

    def _reference(self, batches: Any, in_float64: bool = False) -> HfStep:
        from megasched.verify.reference import hf_step

        subject = self.subject
        (found,) = self.pool.run(
            1,
            hf_step,
            subject.folder,
            batches,
            random_init=subject.random_init,
            trust_remote_code=subject.trust_remote_code,
            in_float64=in_float64,
            watch=True,
            timeout=self.timeout,
        )
        return found

    def _judge(self, found: Verification, reports: list[RankReport], expected: HfStep, batches: Any) -> None:
        from megasched.verify import parity

        outcome = parity.compare_step(reports, expected, self.layout.tp)
        states = self._locator(reports, expected).hidden_states()
        exact = None
        if outcome.wrong or any(error > parity.TOLERANCE for error in states.values()):
            self.progress("the same in float64, to tell rounding from mistakes")
            exact = self._reference(batches, in_float64=True)
            outcome = parity.compare_step(reports, expected, self.layout.tp, exact)
        found.checks = _numbers(outcome)
        found.checks.insert(2, self._states(reports, expected, exact, states))
        self.progress("the optimizer's step")
        found.checks.append(self._step(reports))
        wrong = [check.name for check in found.checks if not check.equal]
        found.verdict, found.why = ("wrong" if wrong else "equal"), outcome.why
        if wrong and not outcome.wrong:
            found.why = f"{', '.join(wrong)}: beyond the tolerance"
        if wrong:
            found.finding = self._locator(reports, expected).first()
        else:
            self._check_dropouts(found, self._locator(reports, expected))

    def _check_dropouts(self, found: Verification, locator: Any) -> None:
        """A second run with dropout, where the architecture has any and TP ranks could disagree."""
        from megasched.verify.dropouts import switch_on, wrong_masks

        if self.layout.tp == 1 or not found.small or not locator.facts.dropouts:
            return
        config = load_config(self.subject.folder, trust_remote_code=self.subject.trust_remote_code)
        if not switch_on(config):
            return
        self.progress("a step with dropout, to see which numbers the ranks draw")
        config.save_pretrained(self.subject.folder)
        finding = wrong_masks(locator, self._scheduled())
        where = "" if finding is None else finding.where
        found.checks.append(Check("dropout masks", None, 0.0, where, finding is None))
        if finding is not None:
            found.verdict, found.finding = "wrong", finding
            found.why = "dropouts draw the wrong random numbers"

    def _locator(self, reports: list[RankReport], expected: HfStep) -> Any:
        from megasched.verify.locate import Locator

        facts = next(report.facts for report in reports if report.facts is not None)
        layout = self.layout
        return Locator(reports, expected, layout.tp, layout.cp, layout.data_parallel_size, facts)

    def _states(
        self, reports: list[RankReport], expected: HfStep, exact: HfStep | None, errors: dict[Any, float]
    ) -> Check:
        """At the boundaries of layers: the largest error that rounding does not explain, if there is one."""
        from megasched.verify import parity
        from megasched.verify.reference import relative

        if not errors:
            return Check("hidden states", None, parity.TOLERANCE)
        beyond = {place: error for place, error in errors.items() if error > parity.TOLERANCE}
        if beyond and exact is not None:
            plain, truth = self._locator(reports, expected), self._locator(reports, exact)
            ours = truth.hidden_states()
            theirs = {place: relative(plain.wanted(*place), truth.wanted(*place)) for place in beyond}
            beyond = {
                place: e for place, e in beyond.items() if not parity.is_rounding(ours[place], theirs[place])
            }
        counted = beyond or errors
        (path, _), gradient = worst = max(counted, key=lambda place: counted[place])
        name = f"gradient at {path}" if gradient else path
        return Check("hidden states", counted[worst], parity.TOLERANCE, name, not beyond)

    def _step(self, reports: list[RankReport]) -> Check:
        """Weights after Megatron's optimizer against those after torch's, given the same gradients."""
        from megasched.verify.trainer_run import gather

        gradients = gather(reports, "gradients", self.layout.tp)
        weights = gather(reports, "weights", self.layout.tp)
        subject = self.subject
        (errors,) = self.pool.run(
            1,
            step_errors,
            subject.folder,
            gradients,
            weights,
            random_init=subject.random_init,
            trust_remote_code=subject.trust_remote_code,
            timeout=self.timeout,
        )
        worst = max(errors, key=lambda name: errors[name])
        return Check("optimizer step", errors[worst], STEP_TOLERANCE, worst, errors[worst] <= STEP_TOLERANCE)


def step_errors(
    folder: str, gradients: dict[str, Any], weights: dict[str, Any], *, random_init: bool, trust_remote_code: bool
) -> dict[str, float]:
    """In a rank: how far weights after a step are from torch's AdamW, relative to the largest change of each."""
    from megasched.verify.reference import adamw_step, hf_model

    model = hf_model(folder, SEED, random_init=random_init, trust_remote_code=trust_remote_code)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    adamw_step(model, gradients, lr=LEARNING_RATE, eps=EPSILON)
    found = {}
    for name, parameter in model.named_parameters():
        change = max(float((parameter.detach() - before[name]).abs().max()), LEARNING_RATE * 1e-2)
        found[name] = float((weights[name] - parameter.detach()).abs().max()) / change
    return found


def _numbers(outcome: Comparison) -> list[Check]:
    from megasched.verify.parity import TOLERANCE

    names = {"loss": "loss", "logits": "logits", "gradient": "gradients", "grad_norm": "gradient norm"}
    worst = {"gradient": outcome.worst}
    return [
        Check(words, outcome.errors.get(name), TOLERANCE, worst.get(name, ""), name not in outcome.wrong)
        for name, words in names.items()
    ]
