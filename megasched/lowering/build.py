"""Defines the library's entry points: a schedule of any ``nn.Module``, built in this process's TP group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from megasched.analysis.analysis_cache import AnalysisCache, usual_length
from megasched.analysis.find_layer_stack import find_layer_stack, layer_stack_of
from megasched.analysis.recording.meta_call import example_inputs
from megasched.analysis.stages.layer_stack import LayerStack
from megasched.definition.build import keep_no_cache
from megasched.definition.objectives import CAUSAL_LM, objective_of
from megasched.errors import ConfigError, Problem, ScheduleError
from megasched.language import schedule as tree
from megasched.language.parallel_dims import ParallelDims, current_layout
from megasched.language.roles import Roles
from megasched.language.schedule import Schedule
from megasched.language.schedule_file import apply_schedule as call_schedule
from megasched.language.schedule_file import find_schedule
from megasched.layers.attention import enable
from megasched.layers.build_context import BuildContext
from megasched.layers.losses.cross_entropy import ParallelLossFunction
from megasched.lowering.call_checks import (
    ReplicaCheck,
    asks_for,
    note_lowered,
    refuse_built,
    refuse_copies,
    refuse_second_derivatives,
    refuse_unnamed,
    refuse_unplanned_outputs,
)
from megasched.lowering.groups import (
    NoGroup,
    check_layout,
    cp_ranks,
    ep_group,
    group_of,
    refuse_other_ranks,
    refuse_unscheduled,
    tp_group,
)
from megasched.lowering.lower import lower, lower_sequence_boundaries
from megasched.lowering.prepare import find_roles, prepare
from megasched.lowering.whole_sequences import one_sequence_rows, refuse_uneven_gradients, take_whole_sequences
from megasched.model_adapters.registry import has_roles
from megasched.plan.make import make_plan
from megasched.plan.placement import Placement
from megasched.plan.plan import Plan
from megasched.weights.deferred import HeldValues, shards_of, with_adapters
from megasched.weights.random_init import Initialiser, RandomInit
from megasched.weights.rank_shard import mark_shards
from megasched.weights.source import Shards, WeightSource, materialize

# Trials compare gradients, also where a model is built within ``torch.no_grad`` or ``torch.inference_mode``.
_WITH_GRADIENTS = partial(torch.inference_mode, False)
# Built model -> the plan that it was built by, how its parameters lie, and the path of the definition in it.
_plans: WeakKeyDictionary[nn.Module, Plan] = WeakKeyDictionary()
_placements: WeakKeyDictionary[nn.Module, dict[str, Placement]] = WeakKeyDictionary()
_definitions: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def is_built(model: nn.Module) -> bool:
    """Returns whether ``build`` has made a model, which a copy of one is not."""
    return model in _plans


def plan_of(model: nn.Module) -> Plan:
    """Returns the plan that a model of the library was built by.

    Raises:
        KeyError: it was not built, or is a copy of one that was.
    """
    return _plans[model]


def placements_of(model: nn.Module) -> dict[str, Placement]:
    """Maps the name of each parameter of a built model to its placement, or to that of the first HF tensor in it.

    Raises:
        KeyError: it was not built, or is a copy of one that was.
    """
    return _placements[model]


def placements_in_state_dict(model: nn.Module) -> dict[str, Placement]:
    """Maps names in a built model's state dict to placements: of buffers, too, and each of a tied parameter's."""
    plan, path = _plans[model], _definitions[model]
    below = _prefix(path)
    planned = dict(plan.placements)
    planned |= {name: planned[of] for name, of in plan.canonical.items() if of in planned}
    return {f"{below}{name}": found for name, found in planned.items()} | _placements[model]


def _prefix(path: str) -> str:
    """Returns what stands before the names of the definition in those of a model that holds it."""
    return f"{path}." if path else ""


def fill_built(made: nn.Module, source: WeightSource, dtype: torch.dtype | None = None) -> None:
    """Gives the deferred parameters of a built model real CPU tensors, each rank its shards, in place.

    Args:
        source: made with a definition that is not built.
        dtype: of the parameters; float32 by default.

    Raises:
        CheckpointError: the source does not fit the model, or a buffer of that is on the meta device.
    """
    plan, path = _plans[made], _definitions[made]
    below = _prefix(path)
    placements = {name.removeprefix(below): found for name, found in _placements[made].items()}
    definition = made.get_submodule(path)
    materialize(definition, with_adapters(source, plan), dtype, _shards(plan, placements))


def _shards(plan: Plan, placements: Mapping[str, Placement]) -> Shards:
    """Says what this rank holds of a model."""
    groups = {"tp": tp_group(), "ep": ep_group()}
    return shards_of(plan, placements, {name: (group.rank(), group.size()) for name, group in groups.items()})


def create_schedule(
    model: nn.Module,
    layout: ParallelDims | None = None,
    roles: Roles | None = None,
    *,
    group: ProcessGroup | None = None,
    name: str | None = None,
    sequence_parallel: bool = False,
    parallel_output: bool = False,
) -> Schedule:
    """Creates a schedule of any ``nn.Module``; the model is not changed before ``build``.

    Args:
        model: an HF model or any other, with real weights or with weights deferred by ``init_empty_weights``.
        layout: how the job is spread; by default the sizes of Megatron's process groups in this process.
        roles: roles of its modules; by default those of an HF model that a run of Megatron's trainer would find.
        group: the ranks over which ``shard`` cuts, if you want to name them: Megatron's tensor-parallel group.
        name: of a schedule that fills it, as for ``apply_schedule``; by default it is empty.
        sequence_parallel: between layers each TP rank has a part of the sequence, as with Megatron's flag of this
            name; an HF model takes and returns whole ones all the same.
        parallel_output: an HF model returns logits cut over the vocabulary, [b, s, v / tp], and computes its loss
            of them so; ``ParallelCrossEntropy`` is the same loss for one's own code.

    Raises:
        ConfigError: there is no schedule of that name.
        ScheduleError: ``group`` holds other ranks than Megatron's tensor-parallel group in this process; or the
            model is built already.
    """
    refuse_built(model)
    if group is not None:
        refuse_other_ranks(group)
    layout = layout or current_layout()
    if sequence_parallel:
        layout = replace(layout, sequence_parallel=True)
    if parallel_output:
        layout = replace(layout, parallel_output=True)
    with _WITH_GRADIENTS():
        sch = tree.create_schedule(model, layout, roles if roles is not None else _known_roles(model, layout))
        if name is not None:
            call_schedule(sch, find_schedule(name))
    return sch


def apply_schedule(
    model: nn.Module,
    name: str,
    *,
    inputs: dict[str, Any] | None = None,
    sequence_parallel: bool = False,
    parallel_output: bool = False,
) -> nn.Module:
    """Creates a schedule of the model, fills it with the one that ``name`` names, and builds it.

    Args:
        model: as for ``create_schedule``.
        name: ``auto``, a schedule file, ``FILE:name``, or a name given to ``register_schedule``.
        inputs: as for ``build``.
        sequence_parallel, parallel_output: as for ``create_schedule``.
    """
    sch = create_schedule(model, name=name, sequence_parallel=sequence_parallel, parallel_output=parallel_output)
    return build(sch, inputs=inputs)


def _known_roles(model: Any, layout: ParallelDims) -> Roles | None:
    if not hasattr(model, "config") or not hasattr(model, "tp_plan"):
        return None
    structure = None if has_roles(model.config.model_type) else layer_stack_of(model)
    try:
        return find_roles(model, structure, layout)
    except ConfigError:
        return None  # a model that no adapter knows can still be scheduled by hand


def build(
    schedule: Schedule,
    *,
    inputs: Mapping[str, Any] | None = None,
    init_weights: Initialiser | None = None,
) -> nn.Module:
    """Builds as ``megasched.build`` does without a trainer: see there (dialects/initialize.py)."""
    refuse_unscheduled(schedule)
    model = schedule.mod
    source = None if init_weights is None else RandomInit(model, torch.initial_seed(), init_weights)
    dtype = next((parameter.dtype for parameter in model.parameters()), None)
    values: list[WeightSource] = []

    def read_ahead(plan: Plan) -> None:
        """Reads all values before the model is changed, as the initialiser may leave some out."""
        if source is not None:
            shards = _shards(plan, _by_groups(plan).placements)
            values.append(HeldValues(with_adapters(source, plan), shards, dtype))

    build_with_plan(schedule, inputs, read_ahead)
    for held in values:
        fill_built(model, held, dtype)
    return model


def build_with_plan(
    schedule: Schedule, inputs: Mapping[str, Any] | None = None, check: Callable[[Plan], None] = lambda plan: None
) -> Plan:
    """Builds a model as ``build`` does, and returns the plan that it was built by.

    Args:
        check: is given the plan, and may raise an error before the model is changed.
    """
    plan, _ = plan_model(schedule, inputs, check=check)
    context = lower_model(schedule, plan, schedule.mod)
    lower_sequence_boundaries(schedule.mod, context, lambda path: True, first=True, last=True)
    if context.context_parallel is not None:
        take_whole_sequences(schedule.mod, context.plan, context.context_parallel)
    return context.plan


def plan_model(
    schedule: Schedule,
    inputs: Mapping[str, Any] | None = None,
    *,
    staged: bool = False,
    check: Callable[[Plan], None] = lambda plan: None,
) -> tuple[Plan, AnalysisCache]:
    """Replaces modules of the model as the schedule asks, and plans it; the model is unchanged where that fails.

    Args:
        staged: a pipeline stage is to be made of it, whose layers have to be known.
        check: as for ``build_with_plan``.

    Returns:
        The plan, and the cached runs that it was made by.

    Raises:
        ScheduleError: with every problem found.
    """
    check_layout(schedule, staged=staged)
    model: Any = schedule.mod
    refuse_built(model)
    refuse_unnamed(inputs)
    given, length = inputs is not None, None  # of a run's sequences; the inputs that are given have their own
    if inputs is None and (inputs := example_inputs(model)) is not None and "input_ids" in inputs:
        length = usual_length(model)
    runs = AnalysisCache(length)
    with one_sequence_rows(schedule.layout), _WITH_GRADIENTS(), ExitStack() as undo:
        if inputs is not None and not asks_for(model, {}, "output_attentions"):  # which a run's attention has not
            undo.callback(enable(model, inputs))
        names = prepare(schedule, model, inputs=inputs, undo=undo).replaced
        structure = find_layer_stack(model) if staged else _layers_asked_for(schedule)
        if structure is not None and not given:
            inputs = structure.trial_inputs()
        plan = make_plan(schedule, model=model, inputs=inputs, structure=structure, runs=runs, replaced=names)
        if schedule.layout.cp > 1:
            refuse_uneven_gradients(model, plan.structure)
        check(plan)
        undo.pop_all()
    return plan, runs


def _layers_asked_for(schedule: Schedule) -> LayerStack | None:
    """Returns the layers and the loss that parallel sequences and ``parallel_output`` go by; None without.

    Raises:
        ScheduleError: the model's layers can't be found, or it has no causal sequences.
    """
    layout, model = schedule.layout, schedule.mod
    if not (layout.sp or layout.cp > 1 or layout.parallel_output):
        return None
    asked = "context parallelism" if layout.cp > 1 else "parallel_output"
    asked = "sequence parallelism" if layout.sp else asked
    if layout.cp > 1 and not (hasattr(model, "config") and objective_of(model) is CAUSAL_LM):
        what = f"context parallelism is of HF's causal language models, and this is a {type(model).__name__}"
        raise ScheduleError(Problem(what, remedy="make Megatron's groups without it"))
    try:
        return find_layer_stack(model)
    except ScheduleError as error:
        what = (
            f"{asked} goes by the layers of an HF model, and these were not seen in a call with the inputs of its "
        )
        what += f"objective: {error.problems[0].what}"
        raise ScheduleError(Problem(what, remedy=f"build it without {asked}")) from error


def lower_model(
    schedule: Schedule, plan: Plan, made: nn.Module, here: Callable[[str], bool] = lambda path: True
) -> BuildContext:
    """Lowers the schedule's model in this process's groups, all but ``lower_sequence_boundaries``.

    Args:
        made: what the user gets: the model, or a module that holds it.
        here: whether a module of the model is lowered.

    Returns:
        The surroundings, with the plan that it was lowered by.
    """
    from megatron.core.model_parallel_config import ModelParallelConfig

    model: Any = schedule.mod
    first = next(model.parameters(), torch.empty(0))
    group = tp_group()
    plan = _by_groups(plan)
    context = BuildContext(
        plan=plan,
        group=group,
        config=ModelParallelConfig(params_dtype=first.dtype, tensor_model_parallel_size=plan.layout.tp),
        source=None,
        device=torch.device("cpu") if first.device.type == "meta" else first.device,
        megatron_finalizes=False,
        expert_group=ep_group(),
        context_parallel=cp_ranks(plan.layout),
    )
    note_lowered(model)
    with _WITH_GRADIENTS():
        lower(schedule, model, context, here)
    schedule.built = True
    note_lowered(made)
    path = next(path for path, module in made.named_modules() if module is model)
    below = _prefix(path)
    names = {name: context.placement_of(name.removeprefix(below)) for name, _ in made.named_parameters()}
    _plans[made], _placements[made] = plan, {name: found for name, found in names.items() if found is not None}
    _definitions[made] = path
    mark_shards(made, [name for name, placement in placements_in_state_dict(made).items() if _cut(placement)])
    if not isinstance(group, NoGroup):
        experts = frozenset(name for name, placement in _placements[made].items() if placement.group == "ep")
        if experts:  # there is no public way to have DDP leave them to the model, which sums their gradients
            leave: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
            leave(made, experts)
        made.register_forward_pre_hook(ReplicaCheck(experts))
    if plan.layout.parallel_output and plan.layout.tp > 1:
        model.loss_function = ParallelLossFunction(context.group)
    refuse_second_derivatives(made, plan.layout)
    refuse_copies(made)
    refuse_unplanned_outputs(model, plan.layout)
    if plan.records_where(lambda primitive: primitive.runs_code_again):
        keep_no_cache(model)  # a layer run again would append to the cache again, as HF notes too
    return context


def _cut(placement: Placement) -> bool:
    """Returns whether a rank has a part of the parameter alone."""
    return placement.sharded and group_of(placement.group).size() > 1


def _by_groups(plan: Plan) -> Plan:
    """Returns the plan of this process; without groups, which Megatron's layers need, modules stay as they are."""
    if not isinstance(tp_group(), NoGroup):
        return plan
    whole = {name: Placement(placement.name, placement.shape) for name, placement in plan.placements.items()}
    return replace(plan, cuts={}, fused_columns=(), placements=whole)
