"""Describes one step of a run: what the options say of it, and what the planner predicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import lcm
from typing import Any

from megasched.cli.output import format_seconds
from megasched.cli.page.recorded import RecordedStep
from megasched.errors import ConfigError, MegaschedError
from megasched.language.parallel_dims import ParallelDims
from megasched.planner.hardware.hardware import GIB, Hardware, load_hardware
from megasched.planner.predict import Prediction, StepFlags, predict, reason_of, refuse_8_bits
from megasched.trainer.session import Session

# Of a pipeline rank in one step, where nobody says how many: enough to see the steady state.
MICROBATCHES_A_RANK = 4


@dataclass(frozen=True)
class StepOptions:
    """Holds what the options of a command say of a step, beside its layout.

    Attributes:
        flags: flags of the run.
        hardware: the GPU that it is for; None where none is named.
        microbatches: micro-batches of the step; None for a few for each pipeline rank.
        wanted: whether a prediction is asked for; without it only a layout whose operations the shapes do not tell
            is measured.
    """

    flags: StepFlags = field(default_factory=StepFlags)
    hardware: Hardware | None = None
    microbatches: int | None = None
    wanted: bool = False


@dataclass(frozen=True)
class StepReport:
    """Describes a step.

    Attributes:
        flags, hardware: as in the options.
        microbatches: number of micro-batches on each pipeline rank.
        tokens: tokens that one GPU trains on.
        prediction: what the planner predicts; None where it was not asked, or can't.
        why_not: why the planner can't predict it; else empty.
    """

    flags: StepFlags
    hardware: Hardware | None
    microbatches: int
    tokens: float
    prediction: Prediction | None = None
    why_not: str = ""

    @property
    def seconds(self) -> float | None:
        """Returns the predicted seconds of the step; None where they are not known."""
        time = self.prediction and self.prediction.time
        return time.total if time else None

    @property
    def waiting(self) -> float | None:
        """Returns the share of the step in which the busiest pipeline rank waits for others: the bubble."""
        time = self.prediction and self.prediction.time
        return time.waiting / time.total if time else None

    @property
    def tokens_per_second(self) -> float | None:
        """Returns the tokens per second of one GPU."""
        return None if self.seconds is None else self.tokens / self.seconds

    @property
    def peak_bytes(self) -> int | None:
        """Returns the bytes on the fullest pipeline rank."""
        return self.prediction.fullest.total if self.prediction else None

    def to_dict(self) -> dict[str, Any]:
        """Returns the step as plain data for JSON."""
        memory = self.prediction.memory if self.prediction else ()
        time = self.prediction and self.prediction.time
        return {
            **asdict(self.flags),
            "gpu": self.hardware and self.hardware.name,
            "microbatches": self.microbatches,
            "step_seconds": self.seconds,
            "seconds": time.parts if time else None,
            "tokens_per_second_per_gpu": self.tokens_per_second,
            "memory_bytes": [{**asdict(one), "total": one.total} for one in memory],
            "usable_bytes": self.hardware and self.hardware.usable_bytes,
            "not_predicted": self.why_not,
        }


def describe_step(session: Session, options: StepOptions, sequence_length: int) -> StepReport:
    """Describes a step of a session, and predicts it if asked to, or if shapes do not tell what is sent."""
    layout = session.plan.layout
    count = options.microbatches or MICROBATCHES_A_RANK * layout.pp
    sequences = count * layout.micro_batch_size * layout.data_parallel_size
    tokens = sequences * sequence_length / layout.world_size
    given = options.flags, options.hardware, count, tokens
    recomputes = options.flags.recompute_granularity is not None or bool(session.plan.records_of("checkpoint"))
    if not options.wanted and layout.cp == layout.ep == 1 and not (recomputes and layout.tp > 1):
        return StepReport(*given)
    try:
        prediction = predict(
            session, options.flags, options.hardware, sequence_length=sequence_length, microbatches=count
        )
    except MegaschedError as error:
        return StepReport(*given, why_not=reason_of(error))
    return StepReport(*given, prediction)


def step_line(step: StepReport) -> str:
    """Returns the figures of a predicted step in one line; empty without hardware."""
    if step.hardware is None:
        return ""
    if step.seconds is None or step.waiting is None or step.peak_bytes is None:
        return f"not predicted on {step.hardware.name}: {step.why_not}"
    return (
        f"predicted on {step.hardware.name}: step {format_seconds(step.seconds)} "
        f"({step.microbatches} micro-batches), {step.waiting:.0%} of it waiting, "
        f"{step.tokens_per_second:,.0f} tokens/s/GPU, {step.peak_bytes / GIB:.2f} of "
        f"{step.hardware.usable_bytes / GIB:.1f} GiB"
    )


def step_options(
    layout: ParallelDims,
    flags: StepFlags,
    gpu: str | None,
    global_batch_size: int | None,
    recorded: RecordedStep | None,
) -> StepOptions:
    """Returns what the options of a command say of a step.

    Args:
        gpu: a known type, or a TOML file.
        global_batch_size: sequences in a step; by default those of the recorded step.

    Raises:
        ConfigError: there is no such hardware, or the batch does not fit the layout or the recorded step.
    """
    hardware = None if gpu is None else load_hardware(gpu)
    if hardware is not None and layout.fp8 is not None:
        refuse_8_bits(hardware, layout.fp8.fp8_recipe)
    microbatches = None if global_batch_size is None else microbatches_of(layout, global_batch_size)
    if recorded is not None and microbatches not in (None, recorded.microbatches):
        raise ConfigError(
            f"--trace {recorded.path}: its steps have {recorded.microbatches} micro-batches, those of "
            f"--global-batch-size {global_batch_size} have {microbatches}; leave that out to take the trace's"
        )
    return StepOptions(flags, hardware, recorded.microbatches if recorded else microbatches)


def sequences_of(layouts: Sequence[ParallelDims]) -> int:
    """Returns the least number of sequences in a step that gives the pipeline ranks of each layout a few."""
    return lcm(*(MICROBATCHES_A_RANK * one.pp * one.micro_batch_size * one.data_parallel_size for one in layouts))


def microbatches_of(layout: ParallelDims, global_batch_size: int) -> int:
    """Returns the number of micro-batches in a step.

    Raises:
        ConfigError: the batch does not fit the layout.
    """
    at_once = layout.micro_batch_size * layout.data_parallel_size
    count, rest = divmod(global_batch_size, at_once)
    if rest or count < 1:
        raise ConfigError(
            f"--global-batch-size {global_batch_size} is no multiple of {at_once}: micro-batches of "
            f"{layout.micro_batch_size} on {layout.data_parallel_size} DP ranks"
        )
    if layout.vpp > 1 and count % layout.pp:
        raise ConfigError(
            f"--global-batch-size {global_batch_size} makes {count} micro-batches: interleaving (VPP) needs a "
            f"multiple of PP {layout.pp}"
        )
    return count
