"""Carries out single records on lowered modules, with one function for each primitive.

The functions are registered as third parties' are: the entry point group ``megasched.lowerings`` names this
module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from megasched.errors import Problem, ScheduleError
from megasched.language.primitives.sync import is_hook
from megasched.language.records import Record
from megasched.language.registry import register_lowering
from megasched.layers.build_context import BuildContext
from megasched.layers.images.batch_norm import share_statistics
from megasched.layers.wrap import Forward, draw_forked, recompute_module, wrap_forward
from megasched.lowering.probe import probe_module


@register_lowering("checkpoint")
def _checkpoint(module: nn.Module, record: Record, context: BuildContext) -> None:
    if "subgraph" in record.arguments:  # a part of a module is done in its graph (graphs.py)
        return
    recompute_module(module, record.path)
    if "order_args_fn" in record.arguments:
        wrap_forward(module, _in_the_same_order(module, record))


def _in_the_same_order(module: nn.Module, record: Record) -> Callable[..., Any]:
    """Returns a wrap of a forward that refuses a call of which ``order_args_fn`` loses or changes an argument."""
    order, takes = record.arguments["order_args_fn"], inspect.signature(type(module).forward)

    def values(*args: Any, **kwargs: Any) -> dict[str, Any]:
        bound = takes.bind(module, *args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def checked(forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        given, asked = values(*args, **kwargs), order(*args, **kwargs)
        try:
            ordered = values(*asked)
            other = [name for name, value in given.items() if not _same(value, ordered[name])]
        except TypeError as error:  # as many as the forward does not take
            other = [f"arguments ({error})"]
        if other:
            what = f"checkpoint: order_args_fn loses or changes {', '.join(other)}, which the parent gives"
            remedy = "leave it out: here arguments arrive as the parent gives them, by name or by position"
            raise ScheduleError(Problem(what, record.path, record.source, remedy))
        return forward(*args, **kwargs)

    return checked


def _same(one: Any, other: Any) -> bool:
    """Returns whether two arguments are one; plain data and collections of such are if they are equal."""
    if isinstance(one, dict | list | tuple):
        if type(one) is not type(other) or len(one) != len(other):
            return False
        if isinstance(one, dict):
            return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
        return all(map(_same, one, other))
    plain = bool | int | float | str | None
    return one is other or (isinstance(one, plain) and type(one) is type(other) and one == other)


@register_lowering("probe")
def _probe(module: nn.Module, record: Record, context: BuildContext) -> None:
    probe_module(module, record, context)


@register_lowering("fork_rng")
def _fork_rng(module: nn.Module, record: Record, context: BuildContext) -> None:
    draw_forked(module)


@register_lowering("annotate")
def _annotate(module: nn.Module, record: Record, context: BuildContext) -> None:
    setattr(getattr(module, record.arguments["param"]), record.arguments["key"], record.arguments["value"])


@register_lowering("hook")
def _hook(module: nn.Module, record: Record, context: BuildContext) -> None:
    _register(module, record.arguments["mode"], record.arguments["fn"])


def _register(module: nn.Module, mode: str, function: Callable[..., Any]) -> None:
    """Registers a hook; the modes of ``hook`` and those of ``sync`` are the same three."""
    register = {
        "fw_pre": module.register_forward_pre_hook,
        "fw_post": module.register_forward_hook,
        "bw_post": module.register_full_backward_hook,
    }[mode.replace("fwd", "fw").replace("bwd", "bw")]
    register(function)


@register_lowering("sync_batch_norm")
def _sync_batch_norm(module: nn.Module, record: Record, context: BuildContext) -> None:
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return
    for inner in module.modules():
        if isinstance(inner, _BatchNorm):
            share_statistics(inner, parallel_state.get_data_parallel_group())


@register_lowering("sync")
def _sync(module: nn.Module, record: Record, context: BuildContext) -> None:
    """Wraps a module in the collective of a ``sync``; the layer of a sharded module communicates by itself."""
    if record.path in context.plan.cuts or context.size == 1:
        return
    mode, op = record.arguments["mode"], record.arguments["op"]
    if callable(op) and is_hook(mode, op):
        _register(module, mode, op)
        return
    operation = _along(record.arguments.get("axis", -1), _operation(record, context))

    def synced(forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        if mode == "fwd_post":
            output = forward(*args, **kwargs)
            return operation(output) if isinstance(output, torch.Tensor) else (operation(output[0]), *output[1:])
        if args:
            return forward(operation(args[0]), *args[1:], **kwargs)
        first = next(name for name, value in kwargs.items() if isinstance(value, torch.Tensor))
        return forward(**{**kwargs, first: operation(kwargs[first])})

    wrap_forward(module, synced, node="sync")


def _along(axis: int, operation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the operation along this dimension of one that works along the last."""
    if axis == -1:
        return operation
    return lambda x: operation(x.transpose(axis, -1)).transpose(axis, -1)


def _operation(record: Record, context: BuildContext) -> Callable[[torch.Tensor], torch.Tensor]:
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
            "all_gather": tp.gather_from_tensor_model_parallel_region,
            "reduce_scatter": tp.reduce_scatter_last_dim_to_tensor_parallel_region,
            "scatter": tp.scatter_to_tensor_model_parallel_region,
        }
    return partial(table[op], group=context.group)


def _with_gradient(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Returns ``x`` with a hook that passes its gradient through ``function`` in the backward."""
    if not x.requires_grad:
        return x
    same = x.view_as(x)
    same.register_hook(function)
    return same


def carried_annotations(
    records: Sequence[Record], renamed: Mapping[str, tuple[str, ...]], model: nn.Module
) -> Iterator[Record]:
    """Yields the records; annotations follow their parameters through a replacement, under the new names.

    An annotation is yielded once for each new parameter that is made of the annotated one.

    Args:
        records: records of the schedule.
        renamed: parameter of a replaced module -> parameters of the definition that it is made of.
        model: the model after replacements. The annotation of a parameter that was dropped is left out.
    """
    held = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for record in records:
        if record.primitive != "annotate":
            yield record
            continue
        param = record.arguments["param"]
        old = f"{record.path}.{param}" if record.path else param
        for name in [new for new, sources in renamed.items() if old in sources] or [old]:
            path, _, leaf = name.rpartition(".")
            if name in held:
                yield replace(record, path=path, arguments={**record.arguments, "param": leaf})
