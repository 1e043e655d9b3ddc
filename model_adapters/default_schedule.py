"""Defines the schedule of ``--model-schedule auto``, which shards every role by ``ROLES``.

It uses Megatron's own layers where they can replace the definition's, if they have experts or if the job asks for
8 bits or overlap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megasched.language.module_specs import LayerSpec, MoeSpec
from megasched.language.roles import ROLES

if TYPE_CHECKING:
    from megasched.language.parallel_dims import ParallelDims
    from megasched.language.schedule import Schedule


def schedule(sch: Schedule, layout: ParallelDims) -> None:
    """Shards all modules with a role; stages are balanced, and recompute follows Megatron's flags."""
    for path, role in sch.roles.role.items():
        cut = ROLES[role]
        if role == "moe.experts" and layout.ep > 1:
            name, _ = next(sch[path].mod.named_parameters())
            sch[path].shard(name, axis=0)
        if cut is None:
            continue
        output = 1 if type(sch[path].mod).__name__ == "Conv1D" else 0
        axis = {"column": output, "row": 1 - output, "vocab": 0, "features": 1}[cut]
        sch[path].shard("weight", axis=axis)
    block, mixture = sch.roles.layer, sch.roles.moe
    mixed = isinstance(mixture, MoeSpec)
    because = _by_megatron(layout) or ("its experts" if mixed else "")
    if isinstance(block, LayerSpec) and because and (_by_megatron(layout) or _takes_layers(block, layout)):
        out = f".{block.attention.out}"
        for path, role in sch.roles.role.items():
            if ROLES[role] == "row" and path.endswith(out):  # inferred ones have no role of their own
                sch[path.removesuffix(out)].level("block", required=False, because=because)
    elif mixed:
        for path, role in sch.roles.role.items():
            if role == "moe.experts":
                sch[path.rpartition(".")[0]].level("block", required=False, because=because)


def _by_megatron(layout: ParallelDims) -> str:
    """Returns for what the job needs Megatron's own layers; empty where it does not."""
    if layout.tp_comm_overlap:
        return "--tp-comm-overlap"
    return "" if layout.fp8 is None else "8 bits"


def _takes_layers(block: LayerSpec, layout: ParallelDims) -> bool:
    """Returns whether layers with experts become Megatron's, with its dispatchers and their flags.

    They do not with packed sequences, which Megatron takes as one row, nor with windows under context parallelism,
    which Transformer Engine has only with some flags.
    """
    windows = any(window is not None for window in block.attention.windows)
    return not layout.packed_sequences and not (layout.cp > 1 and windows)
