"""Whether what is cut can be shared out: arguments of modules, and attributes by which they count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from megasched.analysis.replay import local_count
from megasched.errors import Problem
from megasched.language.roles import Roles
from megasched.plan.plan import Plan


def check_sliced_args(plan: Plan) -> list[Problem]:
    """A problem for each argument of which ranks can't take equal parts."""
    problems = []
    for (path, slot), part in plan.derived.parts.items():
        if part.count % plan.layout.tp:
            what = f"TP {plan.layout.tp} does not divide the {part.count} heads or features of argument {slot!r}"
            problems.append(Problem(what, path, remedy=f"a tensor parallel size that divides {part.count}"))
    return problems


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
            owner, field = owner_of(modules[path], name)
            whole = getattr(owner, field, None)
            if whole is None and not any(path.startswith(prefix) for prefix in replaced):
                what = f"has no attribute {name}, which its adapter divides by TP"
                problems.append(Problem(what, path, remedy="name the attribute that it counts by now"))
            if whole is not None and local_value(plan, path, whole) is None:
                remedy = f"a tensor parallel size that divides {whole}"
                problems.append(
                    Problem(f"TP {plan.layout.tp} does not divide {name} = {whole}", path, remedy=remedy)
                )
    return problems


def local_value(plan: Plan, path: str, whole: int) -> int | None:
    """What one rank has of a count that stands in the module at a path; None where it can't be divided."""
    inside = (heads.heads for inner, heads in plan.replicated_heads.items() if inner.startswith(path + "."))
    return local_count(whole, plan.layout.tp, inside)


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


def owner_of(module: nn.Module, name: str) -> tuple[Any, str]:
    """The object that holds an attribute, and the attribute's name on it."""
    prefix, _, field = name.rpartition(".")
    return (module.config if prefix == "config" else module), field
