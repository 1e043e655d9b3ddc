"""What each pipeline stage holds and how heavy it is."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megasched.cli.amounts import BYTES_16_BITS
from megasched.cli.show.modules import CUT, ModuleReport
from megasched.trainer.session import Session
from megasched.trainer.stages.stage import Stage


@dataclass(frozen=True)
class StageReport:
    """One stage: one model chunk of one pipeline rank.

    Attributes:
        stage: in the order in which a batch runs through them.
        pp_rank, vp_stage: the rank it lives on, and which of that rank's chunks it is.
        start, stop: its layers, half open.
        holds: modules outside the layers that live here too.
        parameters: on one rank, TP shards and vocabulary padding counted.
        flops_share: of the model's forward FLOPs, 0 to 1.
        cut_at: ``file:line`` of the call that ends it; empty where the layers were balanced.
        parameter_bytes: of these parameters, at 16 bits each.
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


def describe_stages(session: Session, sequence_length: int) -> list[StageReport]:
    """All stages of a session's layout; one without a pipeline.

    Args:
        session: its plan must be sound.
        sequence_length: tokens in a sequence; attention's share of the FLOPs grows with it.

    Raises:
        ScheduleError: more stages than layers, or cuts that do not fit.
    """
    plan, structure = session.plan, session.plan.structure
    assert structure is not None
    layers = session.stage_layers(sequence_length) or [structure.count]
    costs, before, after = session.layer_costs(sequence_length)
    total = sum(costs) + before + after
    cuts = {structure.index_of(r.path): r.source for r in plan.records_of(CUT)}
    found, start = [], 0
    for number, count in enumerate(layers):
        stop, first, last = start + count, number == 0, number == len(layers) - 1
        stage = Stage(start, stop, first, last)
        cost = sum(costs[start:stop]) + (before if first else 0.0) + (after if last else 0.0)
        parameters = _parameters(session, stage)
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
            )
        )
        start = stop
    return found


def place_modules(
    session: Session, modules: Sequence[ModuleReport], stages: Sequence[StageReport]
) -> list[ModuleReport]:
    """The modules, each with the stages that it lives on.

    Args:
        modules: parents before children.
    """
    structure = session.plan.structure
    assert structure is not None
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
    structure = session.plan.structure
    assert structure is not None
    owners = dict.fromkeys(name.rpartition(".")[0] for name in session.plan.canonical)
    return tuple(path for path in owners if structure.index_of(path) is None and stage.holds(structure, path))


def _parameters(session: Session, stage: Stage) -> int:
    """Parameters that one rank of this stage holds; a tied one counts once on each stage that has it."""
    plan, structure = session.plan, session.plan.structure
    assert structure is not None
    held = {
        canonical for name, canonical in plan.canonical.items() if stage.holds(structure, name.rpartition(".")[0])
    }
    return sum(math.prod(plan.local_shape(plan.placements[name])) for name in held)
