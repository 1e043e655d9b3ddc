"""Finds what each module sends over the TP group because of the shards, from the plan and the lowering."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megasched.plan.communication import derived_syncs, shared_regions
from megasched.plan.plan import Plan


@dataclass(frozen=True)
class Transfer:
    """Represents one operation over the TP group.

    Attributes:
        phase: ``forward`` or ``backward``.
        op: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``scatter``.
        tensor: ``input`` or ``output`` of the module; in the backward pass, the gradient of it.
        shared_by: paths, below the module, of the linears that one operation serves together; mostly empty.
    """

    phase: Literal["forward", "backward"]
    op: str
    tensor: Literal["input", "output"]
    shared_by: tuple[str, ...] = ()


def transfers(plan: Plan) -> dict[str, list[Transfer]]:
    """Returns the operations of each module over the TP group, by module path; empty at TP 1.

    Linears that read the same activation inside one module share one operation for it, which is listed at that
    module (see ``layers/regions.py`` and ``layers/fused_columns.py``).
    """
    if plan.layout.tp == 1:
        return {}
    regions = {path: columns for path, (_, columns) in shared_regions(plan).items()}
    kept = set(regions)
    for path in plan.attentions | plan.mlps.keys():  # one projection of Megatron's stands for several
        alone = plan.tp_facts.regions.get(path)
        if alone is not None and len(alone.columns) > 1:
            regions[path] = alone.columns
    together = {column for columns in regions.values() for column in columns}
    for columns in plan.fused_columns:  # one product communicates once
        if columns[0] not in together:
            regions[columns[0].rpartition(".")[0]] = columns
    entered = {column for columns in regions.values() for column in columns}
    found = {path: _of_cut(plan, path, path in entered) for path in plan.cuts}
    order = {name.rpartition(".")[0]: place for place, name in enumerate(plan.canonical)}
    for path, columns in regions.items():
        if not columns:  # what is whole inside reads the sequence of all ranks, as experts do
            found[path] = [] if plan.in_block(path) else _of_whole_region(plan, path)
            continue
        # They are found in the order in which a set has them, which differs between layers and runs.
        names = tuple(column[len(path) + 1 :] for column in sorted(columns, key=order.__getitem__))
        again = (path not in kept or plan.in_block(path)) and _gathers_again(plan, columns[0])
        found[path] = _of_input(derived_syncs(plan, columns[0]), names, again)
    return {path: sent for path, sent in found.items() if sent}


def _of_whole_region(plan: Plan, path: str) -> list[Transfer]:
    """Returns the operations of a module that is a region without columns in it (``layers/regions.py``)."""
    split = plan.splits_sequence(path)
    syncs = {"fwd_pre": "all_gather", "bwd_post": "reduce_scatter"} if split else {"bwd_post": "all_reduce"}
    return _of_input({"fwd_pre": None, **syncs})


def _gathers_again(plan: Plan, column: str) -> bool:
    """Returns whether a column that gathers its input's sequence does so once more for its weight's gradient.

    Megatron's do (``core/tensor_parallel/layers.py``), so as not to keep the whole. A region keeps it for all that
    read it, as does ``layers/te/linear.py``.
    """
    return column not in plan.te_linears


def _of_input(
    syncs: dict[str, str | None], shared_by: tuple[str, ...] = (), again: bool = False
) -> list[Transfer]:
    found = []
    if syncs["fwd_pre"]:
        found.append(Transfer("forward", syncs["fwd_pre"], "input", shared_by))
    if again and syncs["fwd_pre"] == "all_gather":
        found.append(Transfer("backward", "all_gather", "input", shared_by))
    if syncs["bwd_post"]:
        found.append(Transfer("backward", syncs["bwd_post"], "input", shared_by))
    return found


def _of_cut(plan: Plan, path: str, entered: bool) -> list[Transfer]:
    syncs = derived_syncs(plan, path)
    found = [] if entered else _of_input(syncs, again=_gathers_again(plan, path))
    if syncs["fwd_post"]:
        found.append(Transfer("forward", syncs["fwd_post"], "output"))
    if syncs["fwd_post"] == "reduce_scatter":  # and its gradient comes back as parts of the sequence
        found.append(Transfer("backward", "all_gather", "output"))
    return sorted(found, key=lambda transfer: transfer.phase != "forward")
