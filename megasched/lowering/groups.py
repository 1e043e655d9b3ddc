"""Reads Megatron's groups of this process, and refuses schedules that are not for them."""

from __future__ import annotations

from typing import cast

import torch
from torch.distributed import ProcessGroup

from megasched.errors import ConfigError, Problem, ScheduleError
from megasched.language.parallel_dims import Group, ParallelDims, current_layout
from megasched.language.records import caller_source
from megasched.language.schedule import Schedule
from megasched.layers.context_parallel import CpGroup


def refuse_other_ranks(group: ProcessGroup) -> None:
    """Raises ScheduleError where a process group is not Megatron's tensor-parallel one; groups of one rank are."""
    from megatron.core import parallel_state

    asked = torch.distributed.get_process_group_ranks(group)
    there = parallel_state.model_parallel_is_initialized()
    neighbours = parallel_state.get_tensor_model_parallel_group() if there else None
    ranks = torch.distributed.get_process_group_ranks(neighbours) if there else [torch.distributed.get_rank()]
    if asked == ranks:
        return
    has = f"Megatron's tensor-parallel group here has {ranks}" if there else "Megatron has no groups here yet"
    make = f"parallel_state.initialize_model_parallel(tensor_model_parallel_size={len(asked)})"
    remedy = f"megatron.core.{make} makes such a group of neighbours; group can then be left out"
    raise ScheduleError(Problem(f"group has the ranks {asked}, and {has}", source=caller_source(), remedy=remedy))


def refuse_unscheduled(schedule: object) -> None:
    """Raises ConfigError for a model that is given where its schedule is taken."""
    if not isinstance(schedule, Schedule):
        what = f"this takes a schedule, and was given a {type(schedule).__name__}"
        raise ConfigError(f"{what}: megasched.create_schedule(model, name='auto') makes one of a model")


def check_layout(schedule: Schedule, *, staged: bool) -> None:
    """Raises ScheduleError where the schedule can't be built in this process."""
    wanted, here = schedule.layout, current_layout()
    problem = None
    if schedule.path:
        problem = Problem("build takes the schedule of the whole model", schedule.path, remedy="build(sch.root)")
    elif schedule.built:
        remedy = "create a schedule of the model as it was before"
        problem = Problem("the schedule is built already", remedy=remedy)
    elif wanted.tp != here.tp:
        what = f"the schedule is for TP {wanted.tp}, and this process stands in a TP group of {here.tp}"
        remedy = f"megatron.core.parallel_state.initialize_model_parallel(tensor_model_parallel_size={wanted.tp})"
        problem = Problem(what, remedy=remedy)
    elif wanted.ep > 1 and (wanted.ep != here.ep or _size_of_cut_experts() > 1):
        what = f"the schedule shares whole experts out over EP {wanted.ep}, and Megatron's groups here have EP "
        what += f"{here.ep} and cut each expert over {_size_of_cut_experts()}"
        sizes = f"expert_model_parallel_size={wanted.ep}, expert_tensor_parallel_size=1"
        remedy = f"megatron.core.parallel_state.initialize_model_parallel(..., {sizes})"
        problem = Problem(what, remedy=remedy)
    elif wanted.cp != here.cp:
        what = f"the schedule is for CP {wanted.cp}, and this process stands in a CP group of {here.cp}"
        remedy = f"megatron.core.parallel_state.initialize_model_parallel(..., context_parallel_size={wanted.cp})"
        problem = Problem(what, remedy=remedy)
    elif wanted.pp > 1 and not staged:
        remedy = "build_stage(sch), or Megatron's trainer: python -m megasched pretrain_gpt.py"
        what = f"build makes whole models, and the layout has {wanted.pp} pipeline stages"
        problem = Problem(what, remedy=remedy)
    if problem is not None:
        raise ScheduleError(problem)


def tp_group() -> ProcessGroup:
    from megatron.core import parallel_state

    grouped = parallel_state.model_parallel_is_initialized()
    return cast(ProcessGroup, parallel_state.get_tensor_model_parallel_group() if grouped else NoGroup())


def ep_group() -> ProcessGroup:
    from megatron.core import parallel_state

    grouped = parallel_state.model_parallel_is_initialized()
    return cast(ProcessGroup, parallel_state.get_expert_model_parallel_group() if grouped else NoGroup())


def group_of(name: Group) -> ProcessGroup:
    """Returns the ranks over which a placement of that group cuts a parameter."""
    return tp_group() if name == "tp" else ep_group()


def cp_ranks(layout: ParallelDims) -> CpGroup | None:
    """Returns the ranks that share a sequence with this one; None without context parallelism."""
    from megatron.core import parallel_state

    if layout.cp == 1:
        return None
    return CpGroup(parallel_state.get_context_parallel_group(), whole_loss=True)


def _size_of_cut_experts() -> int:
    from megatron.core import parallel_state

    size: int = parallel_state.get_expert_tensor_parallel_world_size()
    return size


class NoGroup:
    """Stands in for the TP group in a process without process groups."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1
