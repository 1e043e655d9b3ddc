"""Lowers a definition in place: parallel layers, values, regions, RNG, and what the records ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from megasched.analysis.tp.facts import Region
from megasched.analysis.trials.replacements import Registered
from megasched.definition.images.convolutions import is_batch_norm, is_convolution
from megasched.definition.linears import plain_attributes
from megasched.definition.module_copy import transfer_hooks
from megasched.errors import MegaschedError, Problem, ScheduleError
from megasched.language.lora import DROPOUT
from megasched.language.module_specs import AttentionSpec, LayerSpec, MoeSpec
from megasched.language.records import Record
from megasched.language.registry import get_lowering, get_primitive
from megasched.language.schedule import Schedule
from megasched.layers.attention import AttentionSettings
from megasched.layers.build_context import BuildContext
from megasched.layers.context_parallel import enter_sequence_region, gather_recorded
from megasched.layers.embedding import lower_embedding, lower_features
from megasched.layers.experts import lower_experts
from megasched.layers.fused.activations import fuse_activations
from megasched.layers.fused.experts import fuse_experts
from megasched.layers.fused.gated_mlp import fuse_gates
from megasched.layers.fused.kernels import compiles
from megasched.layers.fused.norms import fuse_norms
from megasched.layers.fused.rotary import fuse_rotary
from megasched.layers.fused_columns import FusedColumns
from megasched.layers.images.convolution import lower_channels
from megasched.layers.linear import lower_linear
from megasched.layers.megatron.attention import lower_attention
from megasched.layers.megatron.layer import lower_block
from megasched.layers.megatron.mlp import lower_mlp
from megasched.layers.megatron.moe import lower_mixture
from megasched.layers.megatron.rotary import rotary_angles
from megasched.layers.regions import (
    enter_region,
    join_returned,
    join_sequence,
    leave_region,
    share_recorded,
    slice_args,
    slices_of,
    split_arguments,
    split_sequence,
    take_local_sequence,
)
from megasched.layers.te.attention import TeCore, uses_transformer_engine
from megasched.layers.te.linear import TeProduct, lower_te_linear
from megasched.layers.tokens import note_batch
from megasched.layers.wrap import draw_forked
from megasched.lowering.graphs import trace_modules, traced_modules, traced_paths
from megasched.lowering.local_counts import divide_local_attributes
from megasched.lowering.partial_gradients import sum_partial_gradients
from megasched.lowering.records import carried_annotations
from megasched.plan.communication import shared_regions
from megasched.plan.fused_columns import fused_paths
from megasched.plan.plan import Plan


def lower(schedule: Schedule, model: nn.Module, context: BuildContext, here: Callable[[str], bool]) -> None:
    """Lowers the modules for which ``here(path)`` holds, and leaves all others alone."""
    plan = context.plan
    regions = shared_regions(plan) if context.size > 1 else {}
    entered = {column for _, columns in regions.values() for column in columns}
    places = Registered(model)
    made: dict[nn.Module, nn.Module] = {}
    if plan.by_megatron:
        _lower_blocks(model, context, here)

    def alone(path: str) -> bool:
        return here(path) and not plan.in_block(path)

    def outside_attention(path: str) -> bool:
        return alone(path) and path not in plan.attentions

    fused, traced = fused_paths(plan), traced_paths(plan)

    def fusible(path: str) -> bool:
        return alone(path) and fused(path) and not traced(path)

    fuse_experts(model, fusible)  # which their exchange among ranks is put around
    for path, module in list(model.named_modules()):
        if not alone(path):
            continue
        if path in plan.cuts:
            lowered = made[module] = _lower_cut(path, module, context, path in entered)
            for parent, name in places[module]:  # an adapter's parent has been lowered before it
                setattr(made.get(parent, parent), name, lowered)
        elif path in plan.experts:
            lower_experts(path, module, context)
        else:
            _lower_whole(path, module, context)
    _join(model, plan, alone)
    trace_modules(model, context, here)  # before anything wraps a module: regions stay outermost
    _fuse(model, context, fusible)
    _enter_sequence_regions(model, context, alone)  # inside of TP regions, which have all of a rank's part
    _lower_regions(regions, model, context, alone)
    if context.size > 1:
        for path in {argument.path for argument in plan.tp_facts.parts}:
            if alone(path):
                slice_args(model.get_submodule(path), slices_of(plan, path), context.group)
    divide_local_attributes(plan.roles, model, context, outside_attention)
    _settle_attention(model, context, outside_attention)
    for path in plan.tp_facts.forked:
        if alone(path):
            draw_forked(model.get_submodule(path))
    if not context.megatron_finalizes:
        sum_partial_gradients(model, context, here, traced_modules(plan))
    for record in carried_annotations(plan.records, schedule.renamed, model):
        if get_primitive(record.primitive).phase == "lowered" and here(record.path):
            _carry_out(record, model, context)


def _carry_out(record: Record, model: nn.Module, context: BuildContext) -> None:
    """Calls the function of a record's primitive, which may be of the user's.

    Raises:
        ScheduleError: it raised an error.
    """
    try:
        get_lowering(record.primitive)(model.get_submodule(record.path), record, context)
    except MegaschedError:
        raise
    except Exception as error:
        what = f"{record.primitive}: its lowering raised {type(error).__name__}: {error}"
        remedy = "mend the lowering, and build a model that is made anew: this one is half built"
        raise ScheduleError(Problem(what, record.path, record.source, remedy)) from error


def lower_sequence_boundaries(
    model: nn.Module, context: BuildContext, here: Callable[[str], bool], *, first: bool, last: bool
) -> None:
    """Splits the hidden state before the layers and joins it after them, under sequence parallelism.

    Each rank runs the layers on a part of the sequence; random draws inside them differ between ranks. Outside of
    Megatron's trainer, which takes the logits alone, hidden states of all layers are returned whole.

    Args:
        first, last: whether the hidden state enters the layers, or leaves them, on this stage.
    """
    structure = context.plan.structure
    if not context.plan.layout.sp or structure is None:
        return
    paths, slot, dim = structure.layer_paths(), structure.slot, structure.sequence_dim
    for path in filter(here, paths):
        layer = model.get_submodule(path)
        draw_forked(layer)
        note_batch(layer, slot, dim, context.tokens)
        split_arguments(layer, context.plan.tp_facts.split_slots.get(path, ()), context.group)
    if first:
        split_sequence(model.get_submodule(paths[structure.first]), slot, dim, context.group)
    if last:
        join_sequence(model.get_submodule(paths[structure.last]), slot, dim, context.group)
    if not context.megatron_finalizes:
        split = [model.get_submodule(path) for path in filter(here, paths) if path != paths[structure.last]]
        around = [module for path, module in model.named_modules() if structure.holds_layers(path)]
        join_returned(around, split, slot, dim, context.group)


def _lower_blocks(model: nn.Module, context: BuildContext, here: Callable[[str], bool]) -> None:
    """Puts Megatron's layers, attention, mixtures and MLPs, with their values, in place of the definition's."""

    roles = context.plan.roles

    def put(path: str, make: Callable[[nn.Module], nn.Module]) -> None:
        old = model.get_submodule(path)
        new = make(old)
        transfer_hooks(old, new)
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, new.train(old.training))

    attention = roles.layer.attention if isinstance(roles.layer, LayerSpec) else roles.attention
    if context.plan.blocks or context.plan.attentions:
        assert isinstance(attention, AttentionSpec)
        angles = rotary_angles(model, attention, context.context_parallel)
    for path in filter(here, sorted(context.plan.blocks)):
        put(path, lambda old, path=path: lower_block(path, old, model, angles, context))
    for path in filter(here, sorted(context.plan.attentions)):
        assert isinstance(roles.attention, AttentionSpec)
        put(path, lambda old, path=path: lower_attention(path, model, roles.attention, angles, context))
    for path in filter(here, sorted(context.plan.mixtures)):
        assert isinstance(roles.moe, MoeSpec)
        put(path, lambda old, path=path: lower_mixture(path, model, roles.moe, context))
    for path in filter(here, sorted(context.plan.mlps)):
        put(path, lambda old, path=path: lower_mlp(path, model, context))


def _join(model: nn.Module, plan: Plan, here: Callable[[str], bool]) -> None:
    """Gives columns of one product a shared ``FusedColumns`` or ``TeProduct``, and other TE linears their own."""
    together = [paths for paths in plan.fused_columns if all(here(path) for path in paths)]
    apart = plan.te_linears.difference(*together)
    for paths in [*together, *((path,) for path in sorted(apart) if here(path))]:
        members: list[Any] = [model.get_submodule(path) for path in paths]
        fused_columns = TeProduct(members) if paths[0] in plan.te_linears else FusedColumns(members)
        for member in members:
            member.fused_columns = fused_columns


def _fuse(model: nn.Module, context: BuildContext, here: Callable[[str], bool]) -> None:
    """Has fewer kernels compute what definitions write in several operations."""
    fuse_norms(model, here, uses_transformer_engine(context.device))
    if compiles(context.device):
        fuse_rotary(model, here)
    gated = fuse_gates(model, context.plan.fused_columns, here)
    if context.device.type == "cuda":  # where each operation is a kernel
        fuse_activations(model, lambda path: here(path) and path.rpartition(".")[0] not in gated)


def _lower_cut(path: str, module: nn.Module, context: BuildContext, entered: bool) -> nn.Module:
    if is_convolution(module) or is_batch_norm(module):
        return lower_channels(path, module, context, entered=entered)
    if isinstance(module, nn.Embedding):
        by_rows = context.plan.cuts[path] == "vocab"
        lowered = (lower_embedding if by_rows else lower_features)(path, module, context)
    elif path in context.plan.te_linears:
        lowered = lower_te_linear(path, module, context, entered=entered)
    else:
        lowered = lower_linear(path, module, context, entered=entered)
    for name, value in plain_attributes(module).items():
        if not hasattr(lowered, name):
            setattr(lowered, name, value)
    transfer_hooks(module, lowered)
    for name, child in module.named_children():  # of an adapter
        lowered.add_module(name, child)
    return lowered.train(module.training)


def _lower_whole(path: str, module: nn.Module, context: BuildContext) -> None:
    """Makes replicated parameters real where they are on meta, fills them and marks partial gradients."""
    # A tied parameter may have two names in one module.
    for name, held in list(module.named_parameters(recurse=False, remove_duplicate=False)):
        placement = context.plan.placement(path, name)
        tied = context.made.get(placement.name)
        if tied is not None:
            setattr(module, name, tied)
            continue
        if held.device.type != "meta" and context.source is None:
            parameter = held
        elif context.source is None:
            continue  # deferred by init_empty_weights
        else:
            dtype = context.dtype(placement, held)
            parameter = nn.Parameter(torch.empty(placement.shape, dtype=dtype, device=context.device))
            setattr(module, name, parameter)
        context.fill(parameter, placement, held)


def _lower_regions(
    regions: Mapping[str, Region], model: nn.Module, context: BuildContext, here: Callable[[str], bool]
) -> None:
    """Wraps the modules whose input enters the TP region once for all columns inside."""
    tp_facts = context.plan.tp_facts
    for path, (slots, columns) in regions.items():
        if not here(path):
            continue
        module, needed = model.get_submodule(path), path in tp_facts.needed_regions
        split = context.plan.splits_sequence(path) and not (columns and tp_facts.whole_inputs.issuperset(columns))
        whole = tp_facts.whole_slots[path] if needed else ()
        enter_region(module, slots, context.group, split, needed=needed, whole=whole)
        if split and not needed:
            for column in columns:
                _read_own_part(model.get_submodule(column), context)
        if path in tp_facts.exits:
            leave_region(module, slots[0], tp_facts.exits[path], context.group)
    # On a pipeline stage that is not the last this module never returns.
    for path, leaves in tp_facts.recorded.items() if context.size > 1 else ():
        share_recorded(path, model.get_submodule(path), leaves, context.group)


def _read_own_part(column: nn.Module, context: BuildContext) -> None:
    """Has a column's adapter read this rank's part of the sequence that the region has gathered.

    The gather at ``lora_B`` then moves only tensors as wide as the adapter's rank, and dropout draws once for each
    token.
    """
    dropout = getattr(column, DROPOUT, None)
    if isinstance(dropout, nn.Module):
        take_local_sequence(dropout, context.group)


def _enter_sequence_regions(model: nn.Module, context: BuildContext, here: Callable[[str], bool]) -> None:
    """Makes modules that need whole sequences gather them from the context parallel ranks.

    Outside of layers, each pipeline stage runs the modules that have no parameters.
    """
    plan, ranks = context.plan, context.context_parallel
    if plan.cp_facts is None or plan.structure is None or ranks is None:
        return
    for path, region in plan.cp_facts.regions.items():
        if here(path) or (plan.structure.index_of(path) is None and not plan.holds_parameters(path)):
            enter_sequence_region(path, model.get_submodule(path), region, ranks)
    for path, places in plan.cp_facts.recorded.items():
        gather_recorded(path, model.get_submodule(path), places, ranks)


def _settle_attention(model: nn.Module, context: BuildContext, here: Callable[[str], bool]) -> None:
    plan = context.plan
    for path, (heads, sharded) in plan.tp_facts.attention.items():
        if here(path):
            sharded = sharded and context.size > 1
            size, group = (context.size, context.group) if sharded else (1, None)
            split = plan.cp_facts is not None and path in plan.cp_facts.attention
            ranks = context.context_parallel if split else None
            te = None
            if uses_transformer_engine(context.device):
                layer = plan.structure.index_of(path) if plan.structure is not None else None
                te = TeCore(size, group, ranks.for_te(context.config, layer) if ranks is not None else None)
            own, first = (heads // size, heads // size * context.rank) if sharded else (None, 0)
            settings = AttentionSettings(own, sharded, te, ranks, plan.layout.packed_sequences, first)
            model.get_submodule(path).megasched_attention = settings
