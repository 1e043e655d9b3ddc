"""Lowers a definition in place: parallel layers, values, regions, RNG, and what the records ask for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from megasched.errors import ConfigError
from megasched.lowering.annotations import carried_annotations
from megasched.lowering.attention import AttentionSettings
from megasched.lowering.attention_te import TeCore, te_attention
from megasched.lowering.context import Context
from megasched.lowering.embedding import lower_embedding
from megasched.lowering.linear import lower_linear
from megasched.lowering.local_attributes import divide_local_attributes
from megasched.lowering.region import (
    draw_forked,
    enter_region,
    join_sequence,
    recompute_module,
    split_sequence,
    wrap_forward,
)
from megasched.records import Record
from megasched.schedule import Schedule

RecordLowering = Callable[[nn.Module, Record, Context], None]
_RECORD_LOWERINGS: dict[str, RecordLowering] = {}


def register_lowering(primitive: str) -> Callable[[RecordLowering], RecordLowering]:
    """Decorator: says how a record of this primitive is carried out on the lowered module.

    The function gets (module, record, context) after all parallel layers are in place; records are carried
    out in the order of the calls. A file that is run again (a schedule file) may register its function again.

    Raises:
        ConfigError: another function is registered for the primitive, or megasched plans it as a whole.
    """

    def decorate(function: RecordLowering) -> RecordLowering:
        known = _RECORD_LOWERINGS.get(primitive, function)
        same = (known.__module__, known.__qualname__) == (function.__module__, function.__qualname__)
        if primitive in PLANNED or not same:
            raise ConfigError(f"a lowering of {primitive!r} is registered already, by {known.__module__}")
        _RECORD_LOWERINGS[primitive] = function
        return function

    return decorate


def is_lowered(primitive: str) -> bool:
    """Whether there is a lowering of this primitive."""
    return primitive in PLANNED or primitive in _RECORD_LOWERINGS


# Planned as a whole before anything is lowered; nothing is left to do for the single record.
PLANNED = frozenset({"shard", "replace", "replace_all", "cut_pipeline_stage"})


def lower(schedule: Schedule, model: nn.Module, context: Context, here: Callable[[str], bool]) -> None:
    """Lowers the modules for which ``here(path)`` holds; the others are left alone."""
    plan = context.plan
    derived = plan.derived.regions.items() if context.size > 1 else ()
    regions = {path: region for path, region in derived if _worth(path, region[1], context)}
    entered = {column for _, columns in regions.values() for column in columns}
    places = module_places(model)
    for path, module in list(model.named_modules()):
        if not here(path):
            continue
        if path in plan.cuts:
            lowered = _lower_cut(path, module, context, path in entered)
            for parent, name in places[module]:
                setattr(parent, name, lowered)
        else:
            _lower_whole(path, module, context)
    for path, (slot, _) in regions.items():
        if here(path):
            enter_region(model.get_submodule(path), slot, context.group, context.splits_sequence(path))
    divide_local_attributes(schedule.roles, model, context, here)
    _settle_attention(model, context, here)
    for path in plan.derived.forked:
        if here(path):
            draw_forked(model.get_submodule(path))
    for record in carried_annotations(plan.records, schedule.renamed, model):
        if record.primitive in PLANNED or not here(record.path):
            continue
        _RECORD_LOWERINGS[record.primitive](model.get_submodule(record.path), record, context)


def lower_sequence_boundaries(
    model: nn.Module, context: Context, here: Callable[[str], bool], *, first: bool, last: bool
) -> None:
    """Sequence parallelism: the layers run on a part of the sequence each; draws inside them differ.

    Args:
        first, last: the hidden state enters from before the layers, leaves to what follows them, here.
    """
    structure = context.plan.structure
    if not context.plan.layout.sp or structure is None:
        return
    paths = [structure.layer_path(index) for index in range(structure.count)]
    for path in paths:
        if here(path):
            draw_forked(model.get_submodule(path))
    if first:
        split_sequence(model.get_submodule(paths[0]), structure.slot, context.group)
    if last:
        join_sequence(model.get_submodule(paths[-1]), structure.slot, context.group)


def _worth(path: str, columns: tuple[str, ...], context: Context) -> bool:
    """A region pays for several columns at once; attention needs it under SP, since it reads the length."""
    attends = any(a == path or a.startswith(path + ".") for a in context.plan.derived.attention)
    return len(columns) > 1 or (attends and context.plan.layout.sp)


def _lower_cut(path: str, module: nn.Module, context: Context, entered: bool) -> nn.Module:
    lowered = (
        lower_embedding(path, module, context)
        if isinstance(module, nn.Embedding)
        else lower_linear(path, module, context, entered=entered)
    )
    carry_hooks(module, lowered)
    return lowered.train(module.training)


def carry_hooks(old: nn.Module, new: nn.Module) -> None:
    """Registers the old module's forward and backward hooks on the new one, after its own."""
    if old._is_full_backward_hook is not None and new._is_full_backward_hook is None:
        new._is_full_backward_hook = old._is_full_backward_hook
    for table in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks"):
        getattr(new, table).update(getattr(old, table))
    for table in (
        "_forward_pre_hooks_with_kwargs",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
    ):
        getattr(new, table).update(getattr(old, table))


def _lower_whole(path: str, module: nn.Module, context: Context) -> None:
    """Parameters that every TP rank holds whole: made real where they are on meta, filled, marked."""
    for name, held in list(module.named_parameters(recurse=False)):
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
            dtype = context.config.params_dtype
            parameter = nn.Parameter(torch.empty(placement.shape, dtype=dtype, device=context.device))
            setattr(module, name, parameter)
        context.adopt(parameter, placement, held)


def _settle_attention(model: nn.Module, context: Context, here: Callable[[str], bool]) -> None:
    for path, (heads, sharded) in context.plan.derived.attention.items():
        if here(path):
            sharded = sharded and context.size > 1
            size, group = (context.size, context.group) if sharded else (1, None)
            te = TeCore(size, group) if context.device.type == "cuda" and te_attention() is not None else None
            settings = AttentionSettings(heads // size, sharded, te)
            model.get_submodule(path).megasched_attention = settings


def module_places(model: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """Module -> every (parent, name) it stands at; a shared module has several."""
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = defaultdict(list)
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                places[child].append((parent, name))
    return places


@register_lowering("checkpoint")
def _checkpoint(module: nn.Module, record: Record, context: Context) -> None:
    recompute_module(module)


@register_lowering("fork_rng")
def _fork_rng(module: nn.Module, record: Record, context: Context) -> None:
    draw_forked(module)


@register_lowering("annotate")
def _annotate(module: nn.Module, record: Record, context: Context) -> None:
    setattr(getattr(module, record.arguments["param"]), record.arguments["key"], record.arguments["value"])


@register_lowering("hook")
def _hook(module: nn.Module, record: Record, context: Context) -> None:
    register = {
        "fw_pre": module.register_forward_pre_hook,
        "fw_post": module.register_forward_hook,
        "bw_post": module.register_full_backward_hook,
    }[record.arguments["mode"]]
    register(record.arguments["fn"])


@register_lowering("sync")
def _sync(module: nn.Module, record: Record, context: Context) -> None:
    """On a sharded module the plan has checked it and the layer does it; elsewhere it is done as written."""
    if record.path in context.plan.cuts or context.size == 1:
        return
    mode, operation = record.arguments["mode"], _operation(record, context)

    def wrapper(forward: Callable[..., Any]) -> Callable[..., Any]:
        def synced(*args: Any, **kwargs: Any) -> Any:
            if mode == "fwd_post":
                output = forward(*args, **kwargs)
                return (
                    operation(output) if isinstance(output, torch.Tensor) else (operation(output[0]), *output[1:])
                )
            if args:
                return forward(operation(args[0]), *args[1:], **kwargs)
            first = next(name for name, value in kwargs.items() if isinstance(value, torch.Tensor))
            return forward(**{**kwargs, first: operation(kwargs[first])})

        return synced

    wrap_forward(module, wrapper)


def _operation(record: Record, context: Context) -> Callable[[torch.Tensor], torch.Tensor]:
    from functools import partial

    from megatron.core import tensor_parallel as tp

    op = record.arguments["op"]
    if record.arguments["mode"] == "bwd_post":
        if callable(op):
            return partial(_with_gradient, op)
        if op == "all_reduce":  # Megatron's works in place, on a gradient that others may use
            return lambda x: _with_gradient(
                torch.clone, tp.copy_to_tensor_model_parallel_region(x, group=context.group)
            )
        # the gradient's shape changes, so the input's does too, the other way: each is the backward of its pair
        table = {
            "all_gather": tp.scatter_to_tensor_model_parallel_region,
            "reduce_scatter": tp.all_gather_last_dim_from_tensor_parallel_region,
            "scatter": tp.gather_from_tensor_model_parallel_region,
        }
    elif callable(op):
        return op
    elif op == "all_reduce":  # Megatron's works in place, on a tensor that others may use
        return lambda x: tp.reduce_from_tensor_model_parallel_region(x.clone(), group=context.group)
    else:
        table = {
            "all_reduce": tp.reduce_from_tensor_model_parallel_region,
            "all_gather": tp.gather_from_tensor_model_parallel_region,
            "reduce_scatter": tp.reduce_scatter_last_dim_to_tensor_parallel_region,
            "scatter": tp.scatter_to_tensor_model_parallel_region,
        }
    return partial(table[op], group=context.group)


def _with_gradient(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """``x``, whose gradient goes through ``function`` on its way back."""
    if not x.requires_grad:
        return x
    same = x.view_as(x)
    same.register_hook(function)
    return same


def within(paths: Iterable[str]) -> Callable[[str], bool]:
    """A ``here`` that holds for these modules and all below them."""
    roots = tuple(paths)
    return lambda path: any(path == root or path.startswith(root + ".") or not root for root in roots)
