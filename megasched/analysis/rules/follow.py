"""Follows the dimension along which a tensor is cut over ranks through an operation.

A column linear's output is cut along its last dimension. Views, transposes and matrix products move the cut. An
operation that can't be computed on a part (a norm over the cut dimension, a slice of it, a product that sums over
it) needs the whole, and so does an operation that has no rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megasched.analysis.rules import elementwise, images, indexing, pieces, products, reductions, views  # noqa: F401
from megasched.analysis.rules.elementwise import pointwise
from megasched.analysis.rules.op_call import NeedsWhole, NoRule, OpCall
from megasched.analysis.rules.op_rules import OpRule, op_rule
from megasched.analysis.rules.table import IN_PLACE, RULES, Rule
from megasched.language.tensor_types import ShardDim


def follow(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: list[torch.Tensor],
    along: Callable[[torch.Tensor], ShardDim | None],
) -> list[ShardDim | None]:
    """Returns how each output of an operation is cut; None for all of them where no operand is cut.

    Args:
        along: tensor -> ``ShardDim``, or None for one that is not cut.

    Raises:
        NeedsWhole: the operation needs all of a dimension that is cut; ``NoRule`` where it has no rule.
    """
    call = OpCall(func, args, kwargs, outputs, along)
    if not call.cut:
        return [None] * len(outputs)
    found = _rule_of(func)(call)
    return [*found] if isinstance(found, list) else [found] * len(outputs)


def _rule_of(func: Any) -> Rule:
    if not isinstance(func, torch._ops.OpOverload):
        raise NoRule
    if (registered := op_rule(func)) is not None:
        return partial(_by_registered, registered)
    if torch.Tag.pointwise in func.tags:
        return pointwise
    name = func.overloadpacket.__name__
    if func.namespace != "aten":  # others may have the names, and do something else
        raise NoRule
    if name in RULES:
        return RULES[name]
    if name.endswith("_") and name[:-1] in IN_PLACE:
        return partial(_in_place, RULES[name[:-1]])
    raise NoRule


def _in_place(rule: Rule, call: OpCall) -> ShardDim | list[ShardDim]:
    """Applies a rule to an operation whose written operand keeps its shape, and so its cut."""
    found = rule(call)
    if found != call.along(call.arguments["self"]):
        raise NeedsWhole
    return found


def _by_registered(rule: OpRule, call: OpCall) -> list[ShardDim]:
    """Applies a rule of third parties, which returns a dimension alone."""
    cut = {name: along for name, value in call.arguments.items() if (along := call.along(value)) is not None}
    forms = {replace(along, dim=0) for along in cut.values()}
    if len(forms) != 1:
        raise NeedsWhole
    dim = rule({name: along.dim for name, along in cut.items()}, call.arguments)
    if dim is None:
        raise NeedsWhole
    (form,) = forms
    return [replace(form, dim=dim % out.dim()) for out in call.outputs]
