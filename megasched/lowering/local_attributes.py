"""Attributes by which a definition counts heads or features: each TP rank has its part of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from megasched.errors import Problem
from megasched.roles import Roles

if TYPE_CHECKING:
    from megasched.lowering.context import Context
    from megasched.lowering.plan import Plan


def check_local_attributes(roles: Roles, model: nn.Module, plan: Plan) -> list[Problem]:
    """A problem for each attribute that the adapter names and that can't be divided by TP.

    A module that a replacement put in another's place may count in a way of its own and lack them.
    """
    problems = []
    modules = dict(model.named_modules())
    replaced = [record.path for record in plan.records_of("replace", "replace_all")]
    sharded = sharded_attention(plan)
    for path, names in roles.local_attributes.items():
        if not sharded(path) or path not in modules:
            continue
        for name in names:
            owner, field = _owner(modules[path], name)
            whole = getattr(owner, field, None)
            if whole is None and not any(path.startswith(prefix) for prefix in replaced):
                what = f"has no attribute {name}, which its adapter divides by TP"
                problems.append(Problem(what, path, remedy="name the attribute that it counts by now"))
            if whole is not None and _local(plan, path, whole) is None:
                remedy = f"a tensor parallel size that divides {whole}"
                problems.append(
                    Problem(f"TP {plan.layout.tp} does not divide {name} = {whole}", path, remedy=remedy)
                )
    return problems


def divide_local_attributes(roles: Roles, model: nn.Module, context: Context, here: Callable[[str], bool]) -> None:
    """Divides the attributes that the adapter names by TP, where the module's heads are sharded.

    ``config.x`` divides a field of the module's config, on a copy of its own.
    """
    if context.size == 1:
        return
    modules = dict(model.named_modules())
    sharded = sharded_attention(context.plan)
    for path, names in roles.local_attributes.items():
        if path not in modules or not here(path) or not sharded(path):
            continue
        if any(name.startswith("config.") for name in names):
            modules[path].config = copy.copy(modules[path].config)
        for name in names:
            owner, field = _owner(modules[path], name)
            if hasattr(owner, field):
                setattr(owner, field, _local(context.plan, path, getattr(owner, field)))


def _local(plan: Plan, path: str, whole: int) -> int | None:
    inside = (heads.heads for inner, heads in plan.replicated_heads.items() if inner.startswith(path + "."))
    return local_count(whole, plan.layout.tp, inside)


def local_count(whole: int, tp: int, replicated: Iterable[int]) -> int | None:
    """What one rank has of a count: its part, or 1 of heads that are replicated; None where it is neither."""
    if whole % tp == 0:
        return whole // tp
    return 1 if whole in replicated else None


def sharded_attention(plan: Plan) -> Callable[[str], bool]:
    """Whether the heads of the attention at a path are cut; an attention that was not seen to run is taken to be,
    where a column inside it hands out a part."""
    cutting = {
        parent
        for path, cut in plan.cuts.items()
        if cut == "column" and path not in plan.derived.gather
        for parent in _parents(path)
    }
    return lambda path: plan.derived.attention.get(path, (0, path in cutting))[1]


def _parents(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path


def _owner(module: nn.Module, name: str) -> tuple[Any, str]:
    """The object that holds an attribute, and the attribute's name on it."""
    prefix, _, field = name.rpartition(".")
    return (module.config if prefix == "config" else module), field
