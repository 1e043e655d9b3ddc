"""Runs ``megasched verify``: compares a schedule at a layout with the unscheduled model, number by number."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from megasched.definition.build import build_definition, load_config
from megasched.definition.objectives import CAUSAL_LM, Objective, find_objective
from megasched.errors import ConfigError, MegaschedError
from megasched.language.parallel_dims import ParallelDims
from megasched.language.schedule_file import find_schedule, split_file
from megasched.trainer.evidence.certificate import subject_of, write_certificate
from megasched.verify.compare_step import StepComparison
from megasched.verify.locate.bisect import Call, bisect_records, write_without
from megasched.verify.parity import failure, refusal_of
from megasched.verify.plain.runs import PlainError
from megasched.verify.ranks.pool import RankError, RankPool
from megasched.verify.report.verification import Verification
from megasched.verify.steps import Steps, Subject, make_subject

MOST_RANKS = 16
# Sets of data that are tried where rounding decides; that each of them holds such a value is no chance.
MOST_DATA = 3


def verify_schedule(
    schedule: str,
    hf_model: str,
    layout: ParallelDims,
    *,
    bf16: bool = False,
    full_size: bool = False,
    layers: int | None = None,
    overrides: Sequence[str] = (),
    trust_remote_code: bool = False,
    objective: Objective = CAUSAL_LM,
    adapter: str | None = None,
    ranks: RankPool | None = None,
    timeout: float = 600,
    progress: Callable[[str], None] = lambda doing: None,
) -> Verification:
    """Compares three steps of Megatron's trainer under a schedule with plain transformers and torch.

    The trainer is rehearsed on CPUs, the reference runs in a process that never imports megasched. Compared are
    loss, logits and gradient norm of each step, what leaves each layer and the gradient that comes back, every
    gradient of the first step and every weight after the last; in bf16 loss, logits and gradients of one step.

    Args:
        schedule: as in ``--model-schedule``.
        hf_model: folder, config file or hub id.
        bf16: train in bf16, and take plain HF's own error in bf16 as the measure (``bfloat16.py``).
        full_size: take the model as it is, with the weights of its folder; otherwise a small copy of it.
        layers: number of layers of the small copy; 4, or as many as there are stages, by default.
        overrides: ``key=value`` for the HF config.
        trust_remote_code: run Python code that comes with the model.
        objective, adapter: as in ``--objective``, which decides class and script, and ``--adapter``.
        ranks: processes to run it on; own ones by default.
        timeout, progress: seconds for each of the runs, and what is called with what is being done.

    Raises:
        ConfigError: too many ranks for one machine, or no small copy can be made.
    """
    _check_size(layout)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="verify") as folder:
        subject = make_subject(
            hf_model,
            Path(folder) / "model",
            layout,
            full_size=full_size,
            layers=layers,
            overrides=overrides,
            trust_remote_code=trust_remote_code,
            objective=objective,
            adapter=adapter,
        )
        found = Verification(schedule, hf_model, layout, subject.model, not full_size, subject.layers, "equal")
        found.bf16, found.objective, found.notes = bf16, objective.name, list(subject.notes)
        with nullcontext(ranks) if ranks is not None else RankPool(MOST_RANKS) as pool:
            steps = Steps(pool, subject, layout, bf16, timeout, progress)
            _fill_until_told(found, steps, _from_anywhere(schedule), Path(folder) / "without.py")
        _note_lacking_layers(found, subject, overrides)
    found.why = found.why.replace(str(Path(folder) / "model"), "DIR")
    found.seconds = round(time.monotonic() - started, 1)
    return found


def _note_lacking_layers(found: Verification, subject: Subject, overrides: Sequence[str]) -> None:
    """Notes that a schedule can't be planned for a small copy alone, and can for the whole model."""
    if found.verdict != "refused" or not subject.small:
        return

    def is_planned(hf_model: str, overrides: Sequence[str] = ()) -> bool:
        try:
            session = subject.open_session(found.schedule, found.layout, hf_model, overrides)
            return session.plan is not None
        except MegaschedError:
            return False

    if not is_planned(subject.folder) and is_planned(found.hf_model, overrides):
        found.notes.append(f"the copy has {found.layers} layers; --layers gives it more")


def certify(
    found: Verification,
    path: Path,
    *,
    overrides: Sequence[str] = (),
    trust_remote_code: bool = False,
    adapter: str | None = None,
) -> None:
    """Writes a verification as a certificate, whatever its verdict.

    Raises:
        ConfigError: it can't be written.
    """
    config = load_config(found.hf_model, overrides, trust_remote_code=trust_remote_code)
    objective = find_objective(found.objective)
    definition = build_definition(config, objective, trust_remote_code=trust_remote_code)
    find_schedule(found.schedule)  # it may put the folder of what it imports on Python's path
    write_certificate(path, subject_of(found.schedule, definition, found.layout, adapter), found.to_dict())


def _check_size(layout: ParallelDims) -> None:
    if layout.world_size > MOST_RANKS:
        raise ConfigError(
            f"{layout} takes {layout.world_size} processes, and at most {MOST_RANKS} are started on one machine. "
            "What can go wrong goes wrong at 2 of each kind, too: e.g. --tp 2 --pp 2"
        )


def _from_anywhere(schedule: str) -> str:
    """Returns a schedule's name with an absolute path, as processes in other folders find it."""
    file, rest = split_file(schedule)
    return ":".join(filter(None, [str(file.resolve()), rest])) if file is not None else schedule


def _near(calls: Sequence[Call]) -> tuple[Call, ...]:
    """Returns the calls with files below the working directory named from there."""
    here = os.getcwd() + os.sep
    return tuple((path, asked, source.removeprefix(here)) for path, asked, source in calls)


def _fill_until_told(found: Verification, steps: Steps, schedule: str, without: Path) -> None:
    """Runs ``_fill``, and again with other data where rounding decides."""
    notes, found.lacks = found.notes, [str(lack) for lack in steps.subject.lacks]
    for _ in range(MOST_DATA):
        _fill(found, steps, schedule, without)
        finding = found.finding
        if finding is None or not finding.tipped:
            return
        steps.progress("with other data, as rounding decides there")
        values = "1 value is" if finding.tipped == 1 else f"{finding.tipped} values are"
        told = f"there {values} 0 but for rounding at {finding.where}, whose slope jumps"
        found.notes = [*notes, f"with other data than the first: {told}"]
        steps = replace(steps, seed=steps.seed + 1)


def _fill(found: Verification, steps: Steps, schedule: str, without: Path) -> None:
    """Runs the steps, and notes the verdict, the checks, and where it goes wrong.

    Args:
        schedule: the name by which the ranks find it.
        without: path for a schedule file that leaves calls out.
    """
    try:
        steps.plan(schedule)
        judge = StepComparison(steps, schedule)
        checks, why, finding = judge.judge()
    except MegaschedError as error:
        found.verdict, found.why = "refused", str(error)
        return
    except (RankError, PlainError) as error:
        outcome = failure(str(error))
        found.verdict, found.why = outcome.verdict, refusal_of(str(error)) or outcome.why  # type: ignore[assignment]
        return
    found.notes = [*found.notes, *judge.notes]
    found.verdict, found.checks, found.why = "equal", checks, why
    found.finding = finding and replace(finding, records=_near(finding.records))
    if found.finding is None and all(check.equal for check in found.checks):
        return
    found.verdict = "wrong"
    if found.finding is None or found.finding.tipped:
        return
    steps.progress("without single calls of the schedule, to see which do it")

    def right_without(calls: Sequence[Call]) -> bool:
        try:
            return judge.is_right(write_without(schedule, calls, without))
        except RankError:  # it can't be planned, or does not run, without them
            return False

    others = [call for call in judge.facts.records if not call[1].partition(": ")[2].startswith("shard(")]
    guilty = bisect_records(found.finding.records, others, right_without)
    found.finding = replace(found.finding, guilty=_near(guilty))
