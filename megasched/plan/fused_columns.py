"""Which column linears are computed by one matrix product: those that read one tensor, where nothing speaks
against it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from torch import nn

from megasched.language.records import Record
from megasched.plan.plan import Plan


def columns_to_fuse(plan: Plan, model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Paths of the columns that one matrix product computes, in the order of their calls."""
    joint = []
    asked = {record.path for record in plan.records_where(lambda primitive: not primitive.keeps_product)}
    fused = fused_paths(plan)
    shared = Counter(plan.canonical.values())
    for paths in plan.derived.shared:
        if plan.in_block(paths[0]):
            continue
        modules = [model.get_submodule(path) for path in paths]
        plain = all(_plain(plan, path, shared) and path not in asked for path in paths)
        alike = len({_kind(module) for module in modules}) == 1
        if plain and alike and all(fused(path) for path in paths):
            joint.append(paths)
    return tuple(joint)


def levels_asked(plan: Plan) -> dict[str, Record]:
    """Path -> the last call of ``level`` on it."""
    return {record.path: record for record in plan.records_of("level")}


def level_at(asked: Mapping[str, Record], path: str) -> Record | None:
    """The call of ``level`` on the module or on the nearest one around it; None without any. One that is not
    required counts where there is no other."""
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
    """Whether a call of ``level`` has to be done."""
    return bool(level.arguments.get("required", True))


def fused_paths(plan: Plan) -> Callable[[str], bool]:
    """Whether a module is at level ``fused`` (or ``block``, where Megatron's layer could not be meant)."""
    asked = levels_asked(plan)

    def fused(path: str) -> bool:
        record = level_at(asked, path)
        return record is None or record.arguments["name"] != "leaf"

    return fused


def _plain(plan: Plan, path: str, shared: Counter[str]) -> bool:
    """Whether a column's weight lies in Megatron's layer as it lies in the definition, and is nobody else's."""
    placement = plan.placement(path, "weight")
    return (
        path not in plan.derived.gather
        and path not in plan.derived.overwritten  # a part of a product is a view of it
        and path not in plan.replicated_heads
        and placement.padded is None
        and shared[placement.name] == 1
    )


def _kind(module: nn.Module) -> tuple[object, ...]:
    """What must be equal: dtype, whether there is a bias, what is trained."""
    own = dict(module.named_parameters(recurse=False))
    return tuple((name, p.dtype, p.requires_grad) for name, p in sorted(own.items()))
