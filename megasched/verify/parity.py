"""Checks every number of one step of Megatron's trainer at a layout against the unscheduled model."""

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass
from textwrap import shorten
from typing import Any, Literal

from megasched.definition.build import load_config
from megasched.definition.small_models.shrink import TOKENS, VOCABULARY
from megasched.trainer.flags.model_sizes import EXPERTS_PER_TOKEN
from megasched.verify import trainer_run
from megasched.verify.ranks.pool import RankError, RankPool
from megasched.verify.reference import HfStep, Rounding, differences, furthest, hf_step, rounding_of

TOLERANCE = 1e-5
# What is beyond the tolerance may be so many times as far from float64 as the unscheduled model in float32 is:
# ranks add up parts that can be larger than their sum.
ROUNDING = 4.0
MOST_ROUNDING = 1e-3  # and no further: a definition that draws random numbers differs from itself, too
LONGEST = 400  # characters of a reason
REFUSAL = re.compile(r"megasched\.errors\.\w+: ")
CHAINED = re.compile(r"\n\n(?:The above exception was|During handling of)")


@dataclass(frozen=True)
class CheckedLayout:
    """Describes a layout of the checks: its ranks, its TP, Megatron's flags, and whether it shards experts."""

    world_size: int
    tp: int
    flags: str
    of_experts: bool = False


LAYOUTS: dict[str, CheckedLayout] = {
    "one": CheckedLayout(1, 1, ""),
    "tp2": CheckedLayout(2, 2, "--tensor-model-parallel-size 2"),
    "tp2-sp": CheckedLayout(2, 2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": CheckedLayout(2, 1, "--pipeline-model-parallel-size 2"),
    "pp2-vpp2": CheckedLayout(2, 1, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    "ep2": CheckedLayout(2, 1, "--expert-model-parallel-size 2", of_experts=True),
    "tp2-pp2": CheckedLayout(4, 2, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "cp2": CheckedLayout(2, 1, "--context-parallel-size 2"),
    "cp2-tp2": CheckedLayout(4, 2, "--context-parallel-size 2 --tensor-model-parallel-size 2"),
}


@dataclass
class Outcome:
    """Describes the outcome of one check.

    Attributes:
        verdict: ``equal``; ``wrong`` (numbers differ); ``refused`` (megasched says why it can't); ``failed``
            (anything else went wrong); ``not applicable`` (a layout of experts, and the model has none).
        errors: relative errors of ``loss``, ``logits``, ``gradient`` and ``grad_norm``.
        worst: the parameter whose gradient differs most.
        why: reason of any verdict but ``equal``; for ``equal``, a note on differences by rounding.
    """

    verdict: Literal["equal", "wrong", "refused", "failed", "not applicable"]
    errors: dict[str, float]
    worst: str = ""
    why: str = ""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_layout(
    ranks: RankPool,
    folder: str,
    name: str,
    timeout: float = 240,
    *,
    schedule: str = "auto",
    adapter: str = "",
    trust_remote_code: bool = False,
) -> Outcome:
    """Checks one step at a layout against the unscheduled model.

    Args:
        ranks: processes to run it on.
        folder: an HF folder with weights, e.g. by ``write_small_model``.
        name: a key of ``LAYOUTS``.
        timeout: seconds for the step.
        schedule: as for ``--model-schedule``.
        adapter: file with an ``ADAPTER`` to use instead of any installed one; empty for that of an ordinary run.
        trust_remote_code: run Python code that lies in the folder.
    """
    layout, started = LAYOUTS[name], time.monotonic()
    flags = [*layout.flags.split(), "--vocab-size", str(VOCABULARY)]
    flags += ["--trust-remote-code"] if trust_remote_code else []
    flags += ["--adapter", adapter] if adapter else []
    options: dict[str, Any] = {"schedule": schedule, "iterations": 1, "random_init": False, "tokens": TOKENS}
    options["mean_draws"] = True
    of_folder = {"random_init": False, "trust_remote_code": trust_remote_code, "mean_draws": True}
    try:
        if layout.of_experts and not ranks.run(1, routes_to_experts, folder, timeout=timeout)[0]:
            return Outcome("not applicable", {}, why="its tokens go through no experts")
        reports = ranks.run(layout.world_size, trainer_run.train, folder, flags, timeout=timeout, **options)
        batches = trainer_run.batches_of(reports)
        (expected,) = ranks.run(1, hf_step, folder, batches, timeout=timeout, **of_folder)
    except RankError as error:
        outcome = failure(str(error).replace(folder, "DIR"))
    else:
        outcome = compare(reports, expected, layout.tp)
        if outcome.verdict == "wrong" and outcome.errors:
            (rounding,) = ranks.run(1, rounding_of, folder, batches, timeout=timeout, **of_folder)
            outcome = compare(reports, expected, layout.tp, rounding)
    outcome.seconds = round(time.monotonic() - started, 1)
    return outcome


def routes_to_experts(folder: str) -> bool:
    """Returns whether a model's config routes each token to some of several experts; runs in a rank."""
    config = load_config(folder).get_text_config(decoder=True)
    return any(getattr(config, name, None) for name in EXPERTS_PER_TOKEN)


def compare(
    reports: list[trainer_run.RankReport], expected: HfStep, tp: int, rounding: Rounding | None = None
) -> Outcome:
    """Compares the first iteration of a run with the reference.

    Args:
        rounding: what rounding does to the reference, where that is known. A number beyond the tolerance may be
            ``ROUNDING`` times as far from float64 as the reference itself is.
    """
    logits = trainer_run.logits_of(reports)
    gradients = trainer_run.gather(reports, "gradients", tp)
    differing = sorted(gradients.keys() ^ expected.gradients.keys())
    if differing or len(logits) != len(expected.logits):
        return Outcome("wrong", {}, why=f"not on both sides: {', '.join(differing) or 'logits'}")
    norm = furthest((report.grad_norms[0] for report in reports), expected.grad_norm)
    got = HfStep(trainer_run.losses(reports)[0], logits, gradients, norm)
    found = differences(got, expected)
    worst = max(expected.gradients, key=lambda name: found[name])
    errors = {"loss": found["loss"], "logits": found["logits"], "gradient": found[worst]}
    errors["grad_norm"] = found["grad_norm"]
    wrong = [name for name, error in found.items() if not error <= TOLERANCE]
    note = ""
    if wrong and rounding is not None:
        ours, theirs = differences(got, rounding.exact), rounding.errors
        most = max(wrong, key=lambda name: found[name])
        note = f"{most} differs by {found[most]:.1e}; from float64 it is {ours[most]:.1e}, "
        note += f"and the unscheduled model's {theirs[most]:.1e}"
        wrong = [name for name in wrong if not is_rounding(ours[name], theirs[name])]
    if not wrong:
        return Outcome("equal", errors, worst, note)
    bad = [name for name in wrong if name in expected.gradients]
    kinds = [name for name in errors if name in wrong or (name == "gradient" and bad)]
    why = f"{', '.join(kinds)} differ by more than {TOLERANCE:g}"
    why += f"; gradients of {', '.join(bad[:4])}{' ...' if len(bad) > 4 else ''}" if bad else ""
    return Outcome("wrong", errors, worst, why)


def is_rounding(ours: float, theirs: float) -> bool:
    """Returns whether rounding explains an error against float64, given the unscheduled model's own."""
    return ours <= min(ROUNDING * theirs, MOST_ROUNDING)


def failure(report: str) -> Outcome:
    """Returns the outcome of a failed case, with the reason from its report in a line or two.

    It leaves out the line of the schedule that asked, which is a path on the machine of the check.
    """
    if refusal := refusal_of(report):
        told = " ".join(refusal.split()).removeprefix("the schedule has a problem: - ")
        return Outcome("refused", {}, why=_shortened(re.sub(r" asked for at: \S+", "", told)))
    errors = [line for line in report.splitlines() if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
    errors.sort(key=lambda line: "gloo" in line)  # of a rank that lost the one that failed
    return Outcome("failed", {}, why=_shortened((errors or report.splitlines() or ["no report"])[0]))


def refusal_of(report: str) -> str:
    """Returns the message of megasched's own error in a report of ranks, as it was written; empty without one."""
    for of_rank in report.split("\n--- rank"):
        raised = of_rank.split("\n    its output:")[0]
        if found := [*REFUSAL.finditer(raised)]:  # the last one, which the others are causes of
            return CHAINED.split(raised[found[-1].end() :], maxsplit=1)[0].strip()
    return ""


def _shortened(text: str) -> str:
    """Shortens a text to ``LONGEST`` characters in whole words, so that no flag is cut."""
    return shorten(text, LONGEST, placeholder=" …", break_on_hyphens=False)
