"""Builds the report of ``megasched show`` without a GPU: what a schedule does, and what each stage holds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from megasched.analysis.analysis_cache import USUAL_LENGTH, usual_length
from megasched.analysis.stages.shapes import Shape
from megasched.cli.output import BYTES_16_BITS
from megasched.cli.show.modules import CUT, ModuleReport, describe_modules
from megasched.cli.show.step import StepOptions, StepReport, describe_step
from megasched.errors import ConfigError, ScheduleError
from megasched.language.parallel_dims import ParallelDims
from megasched.language.records import Record
from megasched.planner.measure.parameter_counts import ParameterCounts
from megasched.planner.memory import static_bytes
from megasched.planner.predict import StepFlags
from megasched.trainer.evidence.compatibility import unchecked_options, unverified, verify_command
from megasched.trainer.evidence.matrix import load_matrix
from megasched.trainer.session import Session, open_session
from megasched.trainer.session_from_args import parameter_counts
from megasched.trainer.stages.stage import Stage

AUTO = "auto"


@dataclass(frozen=True)
class ShowReport:
    """Holds everything that ``megasched show`` prints.

    Attributes:
        hf_model: folder or hub id of the definition.
        model: class of the definition, e.g. ``LlamaForCausalLM``.
        schedule: name of the schedule, as given: ``auto``, a file, or a registered name.
        parameters: number of parameters of the whole model, tied ones once, padding not counted.
        trained: number of trained parameters among them.
        sequence_length: tokens in a sequence, for the shares of FLOPs.
        layout: how the job is spread.
        modules: reports in the order of the module tree, unfolded.
        stages: in the order in which a batch runs through them.
        records: the schedule's calls.
        unverified: why a run would need ``--allow-unverified``; empty where it does not.
        unchecked_options: fields of the config by which the class may take another path than when it was checked.
        check: the command that would check these options.
        hidden_size: width of the hidden state between layers, of all its streams; None where that is not known.
        sent_width: width of what pipeline stages send each other, which may be more; None without stages.
        layers: path of the list of layers.
        step: what a step costs.
    """

    hf_model: str
    model: str
    schedule: str
    parameters: int
    trained: int
    sequence_length: int
    layout: ParallelDims
    modules: list[ModuleReport]
    stages: list[StageReport]
    records: list[Record]
    unverified: list[str]
    unchecked_options: list[str]
    check: str
    hidden_size: int | None
    sent_width: int | None
    layers: str
    step: StepReport

    @property
    def recomputes(self) -> bool:
        """Returns whether anything is computed again in the backward pass."""
        return self.step.flags.recompute_granularity is not None or any(one.recompute for one in self.modules)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data for JSON, with the records as text."""
        names = [name for name in vars(self) if name not in ("layout", "modules", "stages", "records", "step")]
        return {
            **{name: getattr(self, name) for name in names},
            "layout": asdict(self.layout),
            "modules": [asdict(module) for module in self.modules],
            "stages": [asdict(stage) for stage in self.stages],
            "records": [{"call": str(record), "source": record.source} for record in self.records],
            "step": self.step.to_dict(),
        }


def inspect_schedule(
    schedule: str,
    hf_model: str,
    layout: ParallelDims,
    *,
    sequence_length: int | None = None,
    overrides: Sequence[str] = (),
    trust_remote_code: bool = False,
    objective: str | None = None,
    adapter: str | None = None,
    make_vocab_size_divisible_by: int = 128,
    step: StepOptions | None = None,
) -> ShowReport:
    """Plans a schedule as a run would, without process groups, devices or weights.

    Args:
        schedule: what ``--model-schedule`` would say.
        hf_model: what ``--hf-model`` would say; only its config is read.
        layout: the layout of the run.
        sequence_length: ``--seq-length``; by default 4096, or all that the model has positions for.
        overrides: ``key=value`` for the HF config.
        trust_remote_code: run Python code that comes with the model.
        objective: what ``--objective`` would say; None for a causal language model.
        adapter: what ``--adapter`` would say.
        make_vocab_size_divisible_by: Megatron's flag; vocabularies are padded to a multiple of it times TP.
        step: what is known of a step.

    Raises:
        ConfigError, ScheduleError: anything that a run would refuse about model, schedule and layout.
    """
    asked: dict[str, Any] = {"overrides": overrides, "trust_remote_code": trust_remote_code}
    asked |= {"objective": objective, "adapter": adapter}
    padded = {"make_vocab_size_divisible_by": make_vocab_size_divisible_by}
    session = open_session(schedule, hf_model, layout, **padded, **asked)
    sequence_length = _length(session, sequence_length)
    session.freeze_unreached(layout.micro_batch_size, sequence_length)
    session.runs.length = sequence_length  # the plan has to hold for it
    _name_sources(session, schedule)
    structure = session.plan.stack
    step = step or StepOptions()
    stages = describe_stages(session, sequence_length, step.flags)
    return ShowReport(
        hf_model,
        type(session.definition).__name__,
        schedule,
        *parameter_counts(session.replaced),
        sequence_length,
        layout,
        place_modules(session, describe_modules(session), stages),
        stages,
        list(session.schedule.records),
        unverified(session.definition, layout, load_matrix()["types"]),
        unchecked_options(session.definition),
        verify_command(schedule, hf_model, layout, **asked),
        _width(structure.hidden),
        _sent_width(session, stages, sequence_length),
        structure.layers,
        describe_step(session, step, sequence_length),
    )


def _length(session: Session, asked: int | None) -> int:
    """Returns the tokens in a sequence; by default as many as the model and the layout take.

    Raises:
        ConfigError: a run at this layout would refuse as many as were asked for.
    """
    layout = session.plan.layout
    if asked is not None:
        refuse_length(layout, asked)
        return asked
    usual = _default_length(session)
    return usual - usual % layout.sequence_multiple or layout.sequence_multiple


def refuse_length(layout: ParallelDims, length: int) -> None:
    """Refuses sequences that a run at this layout would.

    Raises:
        ConfigError: it can't cut them.
    """
    if length % layout.sequence_multiple:
        what = f"--seq-length {length} is no multiple of {layout.sequence_multiple}"
        raise ConfigError(f"{what}: {layout} cuts each sequence into that many parts")


def _width(hidden: Shape) -> int | None:
    fixed = hidden.dims[:1] == ("b",) and "s" not in hidden.dims  # a number of positions, as of an image
    features = [size for size in hidden.dims[2 if fixed else 0 :] if isinstance(size, int)]
    return math.prod(features) if features else None


def _sent_width(session: Session, stages: Sequence[StageReport], length: int) -> int | None:
    """Returns the width of what stages send in bf16; None of a single stage.

    Raises:
        ScheduleError: more has to cross than this layout can carry.
    """
    cuts = [stage.start for stage in stages[1:]]
    if not cuts:
        return None
    batch = session.plan.layout.micro_batch_size, length
    return session.sent_width(session.packing(cuts, torch.bfloat16, batch))


def _default_length(session: Session) -> int:
    """Returns `USUAL_LENGTH`, or less for a model whose table of positions is shorter; rotary ones go on."""
    try:
        session.forward_flops(USUAL_LENGTH)
    except ScheduleError:
        return usual_length(session.definition)
    return USUAL_LENGTH


def _name_sources(session: Session, schedule: str) -> None:
    """Sets the source of what the default schedule does, since no line of the user's asks for it."""
    if schedule == AUTO:
        records = session.schedule.records
        records[:] = [replace(record, source="--model-schedule auto") for record in records]


@dataclass(frozen=True)
class StageReport:
    """Describes one stage: one model chunk of one pipeline rank.

    Attributes:
        stage: number in the order in which a batch runs through the stages.
        pp_rank, vp_stage: the rank it lives on, and the number of the chunk on that rank.
        start, stop: its layers, half open.
        holds: modules outside the layers that live on this stage, too.
        parameters: number of parameters on one rank, with TP shards and vocabulary padding counted.
        flops_share: its share of the model's forward FLOPs, 0 to 1.
        cut_at: ``file:line`` of the call that ends it; empty where the layers were balanced.
        parameter_bytes: bytes of these parameters, at 16 bits each.
        gradients, expert_gradients: numbers in gradients on one rank; those of experts sharded over EP are apart.
        state_bytes: bytes of parameters, gradients and optimizer state on one rank, as a run in bf16 holds them.
    """

    stage: int
    pp_rank: int
    vp_stage: int
    start: int
    stop: int
    holds: tuple[str, ...]
    parameters: int
    flops_share: float
    cut_at: str = ""
    parameter_bytes: int = 0
    gradients: int = 0
    expert_gradients: int = 0
    state_bytes: tuple[int, int, int] = (0, 0, 0)


def describe_stages(session: Session, sequence_length: int, flags: StepFlags) -> list[StageReport]:
    """Returns all stages of a session's layout; without a pipeline there is one.

    Args:
        session: a session with a sound plan.
        sequence_length: tokens in a sequence; attention's share of the FLOPs grows with it.
        flags: flags of the run that decide what a rank holds.

    Raises:
        ScheduleError: more stages than layers, or cuts that do not fit.
    """
    plan, structure = session.plan, session.plan.stack
    layers = session.stage_layers(sequence_length) or [structure.count]
    costs, before, after = session.layer_costs(sequence_length)
    total = sum(costs) + before + after
    cuts = {structure.index_of(r.path): r.source for r in plan.records_of(CUT)}
    counts = ParameterCounts(session)
    found, start, sharded = [], 0, flags.use_distributed_optimizer
    for number, size in enumerate(layers):
        stop, first, last = start + size, number == 0, number == len(layers) - 1
        stage = Stage(start, stop, first, last)
        cost = sum(costs[start:stop]) + (before if first else 0.0) + (after if last else 0.0)
        count = counts.held([stage])
        parameters = count.trained + count.frozen
        found.append(
            StageReport(
                number,
                number % plan.layout.pp,
                number // plan.layout.pp,
                start,
                stop,
                _outside_layers(session, stage),
                parameters,
                cost / total,
                cuts.get(stop - 1, ""),
                BYTES_16_BITS * parameters,
                count.dense,
                count.experts,
                static_bytes(count, plan.layout, torch.bfloat16, flags.gradient_dtype, sharded=sharded),
            )
        )
        start = stop
    return found


def place_modules(
    session: Session, modules: Sequence[ModuleReport], stages: Sequence[StageReport]
) -> list[ModuleReport]:
    """Returns the modules, each with the stages that it lives on.

    Args:
        modules: parents before children.
    """
    structure = session.plan.stack
    last = len(stages) - 1
    held = [Stage(s.start, s.stop, s.stage == 0, s.stage == last) for s in stages]
    inside: dict[str, set[int]] = defaultdict(set)  # container -> stages of what is in it
    found: dict[str, tuple[int, ...]] = {}
    for module in reversed(modules):
        own = {number for number, stage in enumerate(held) if stage.holds(structure, module.path)}
        if inside[module.path] and not module.parameters:
            own = inside[module.path]
        inside[module.path.rpartition(".")[0]] |= own
        found[module.path] = tuple(sorted(own))
    return [replace(module, stages=found[module.path]) for module in modules]


def _outside_layers(session: Session, stage: Stage) -> tuple[str, ...]:
    structure = session.plan.stack
    owners = dict.fromkeys(name.rpartition(".")[0] for name in session.plan.canonical)
    return tuple(path for path in owners if structure.index_of(path) is None and stage.holds(structure, path))
