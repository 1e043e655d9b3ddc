"""Which layers are alike: one of each kind is measured, and stands for the others."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from megasched.plan.plan import Plan

# Attributes that tell layers apart which are alike in all else.
_NUMBERING = ("layer_idx", "layer_id", "layer_index", "block_idx", "idx")


def layer_kinds(model: nn.Module, plan: Plan) -> list[int]:
    """For each layer the first one that is like it: the same modules, settings, shards and records.

    Args:
        model: the definition, replacements made.
        plan: made for it; its structure must be known.
    """
    structure = plan.structure
    assert structure is not None
    records: dict[str, list[Hashable]] = {}
    for record in plan.records:
        records.setdefault(record.path, []).append((record.primitive, repr(sorted(record.arguments.items()))))
    first: dict[Hashable, int] = {}
    return [
        first.setdefault(_look(model.get_submodule(path), path, plan, records), index)
        for index, path in enumerate(map(structure.layer_path, range(structure.count)))
    ]


def _look(layer: nn.Module, path: str, plan: Plan, records: dict[str, list[Hashable]]) -> Hashable:
    found: list[Hashable] = []
    for relative, module in layer.named_modules():
        whole = f"{path}.{relative}" if relative else path
        settings = [(k, v) for k, v in vars(module).items() if _is_setting(k, v)]
        shapes = [
            (name, plan.local_shape(plan.placements[plan.canonical[f"{whole}.{name}"]]))
            for name, _ in module.named_parameters(recurse=False)
        ]
        found.append((relative, type(module), tuple(settings), tuple(shapes), tuple(records.get(whole, ()))))
    return tuple(found)


def _is_setting(name: str, value: Any) -> bool:
    return isinstance(value, bool | int | float | str) and name not in _NUMBERING and not name.startswith("_")
