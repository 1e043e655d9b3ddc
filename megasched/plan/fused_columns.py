"""Decides which column linears one matrix product computes: those that read one tensor and are alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from torch import nn

from megasched.definition.linears import is_linear
from megasched.language.records import Record
from megasched.plan.plan import Plan


def columns_to_fuse(plan: Plan, model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Returns groups of column paths, each computed by one matrix product, in the order of their calls."""
    fused_columns = []
    asked = {record.path for record in plan.records_where(lambda primitive: not primitive.keeps_product)}
    fused = fused_paths(plan)
    shared = Counter(plan.canonical.values())
    for paths in plan.tp_facts.shared:
        if plan.in_block(paths[0]):
            continue
        modules = [model.get_submodule(path) for path in paths]
        linear = all(is_linear(module) for module in modules)
        plain = linear and all(_plain(plan, path, shared) and path not in asked for path in paths)
        alike = len({_kind(module) for module in modules}) == 1
        if plain and alike and all(fused(path) for path in paths):
            fused_columns.append(paths)
    return tuple(fused_columns)


def levels_asked(plan: Plan) -> dict[str, Record]:
    """Maps each path with a ``level`` call to the last call on it."""
    return {record.path: record for record in plan.records_of("level")}


def level_at(asked: Mapping[str, Record], path: str) -> Record | None:
    """Returns the ``level`` call on a module or on the nearest one around it; None without any.

    A call that is not required counts only where there is no required one.
    """
    preferred = None
    while True:
        found = asked.get(path)
        if found is not None and required(found):
            return found
        preferred = preferred or found
        if not path:
            return preferred
        path = path.rpartition(".")[0]


def required(level: Record) -> bool:
    """Returns whether a call of ``level`` must be carried out, so that failing to is a problem."""
    return bool(level.arguments.get("required", True))


def fused_paths(plan: Plan) -> Callable[[str], bool]:
    """Returns a predicate on paths: whether the level of the module is any but ``leaf``."""
    asked = levels_asked(plan)

    def fused(path: str) -> bool:
        record = level_at(asked, path)
        return record is None or record.arguments["name"] != "leaf"

    return fused


def _plain(plan: Plan, path: str, shared: Counter[str]) -> bool:
    """Returns whether a column's weight is laid out in Megatron's layer as in the definition, and is not tied."""
    placement = plan.placement(path, "weight")
    return (
        path not in plan.tp_facts.gather
        and path not in plan.tp_facts.overwritten  # a part of a product is a view of it
        and path not in plan.tp_facts.read_elsewhere  # the gradient of a product is added for all of its readers
        and path not in plan.replicated_heads
        and placement.padded is None
        and shared[placement.name] == 1
    )


def _kind(module: nn.Module) -> tuple[object, ...]:
    """Returns what must be equal in fused columns: names, dtypes and ``requires_grad`` of their parameters."""
    own = dict(module.named_parameters(recurse=False))
    return tuple((name, p.dtype, p.requires_grad) for name, p in sorted(own.items()))
