"""Checks the sizes that a definition's code reads off cut tensors, or holds as numbers, with one rank's shapes."""

from __future__ import annotations

from collections.abc import Container, Mapping
from contextlib import ExitStack
from typing import Any

from torch import nn

from megasched.analysis.tp.module_call import ModuleCall
from megasched.analysis.tp.replay import PLACES, Rank, divided, join, local_linears, replay


def columns_of_unproven_sizes(
    probe: nn.Module,
    calls: Mapping[str, ModuleCall],
    rank: Rank,
    cuts: Container[str],
    counts: Mapping[str, tuple[str, ...]],
) -> set[str]:
    """Returns the columns whose output must stay whole, as the code that reads it does something else on a rank.

    Each module whose own code works on shards runs once more. Its linears return a rank's part, and its counts are
    divided. Each operation must give the shape that the labelled run expects on one rank, and use the same
    numbers. Of like modules, one runs.

    Args:
        probe: a ``meta_copy`` of the definition.
        calls: calls of its modules, as a labelled run recorded them.
        rank: what one rank has. Its ``cuts`` leave out linears that are gathered, or were cut only in the labelled
            run, and columns that nobody asks for.
        cuts: paths of what was cut in that run.
        counts: path of a module -> its attributes that will be divided by TP.
    """
    unproven: set[str] = set()
    known: dict[Any, list[tuple[int, ...]] | None] = {}
    made: dict[int, tuple[int, ...]] = {}
    for path, call in calls.items():
        if path in cuts or call.columns.isdisjoint(rank.cuts):
            continue
        module = probe.get_submodule(path)
        kind = (type(module), _numbers(module), *call.signature(made))
        if kind not in known:
            with ExitStack() as stack:
                for inner, child in module.named_modules():
                    full = join(path, inner)
                    if local := _counts(child, full, counts.get(full, ()), rank):
                        stack.enter_context(divided(child, local))
                stack.enter_context(local_linears(module, path, rank))
                shapes = replay(module, path, call, rank.tp, cuts, made)
                known[kind] = None if shapes is None else list(shapes.values())
        same = known[kind]
        if same is None:
            unproven |= call.columns
        else:
            made.update(zip(call.of_one_value, same, strict=True))
    return unproven


def _numbers(module: nn.Module) -> tuple[tuple[str, int], ...]:
    """Returns the integers that a module and those inside hold, except for their places among the layers."""
    held = {
        f"{inner}.{name}": value
        for inner, child in module.named_modules()
        for name, value in vars(child).items()
        if type(value) is int and name not in PLACES
    }
    return tuple(sorted(held.items()))


def _counts(module: nn.Module, path: str, names: tuple[str, ...], rank: Rank) -> dict[str, int]:
    """Returns a rank's part of each attribute of a module that is divided."""
    found = {}
    for name in names:
        owner = module.config if name.startswith("config.") else module
        whole = getattr(owner, name.removeprefix("config."), None)
        local = None if whole is None else rank.count(path, whole)
        if local is not None:
            found[name] = local
    return found
