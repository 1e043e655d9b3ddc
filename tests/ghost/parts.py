"""Attention, MLPs and mixtures by Megatron's modules wherever these are known to be the same; no whole layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megasched.language.module_specs import AttentionSpec
from megasched.model_adapters.default_schedule import schedule as default_schedule

if TYPE_CHECKING:
    from megasched.language.parallel_dims import ParallelDims
    from megasched.language.schedule import Schedule


def schedule(sch: Schedule, layout: ParallelDims) -> None:
    """The default one, its layers taken apart; a part that Megatron's module can't stand for stays as it is."""
    default_schedule(sch, layout)
    roles = sch.roles
    for path, module in sch.mod.named_modules():
        if type(module).__name__ == "ModuleList":
            for name, _ in module.named_children():
                sch[path][name].level("fused", required=False)  # a required one would count more than those below
    parts = [*roles.mlps, *(path.rpartition(".")[0] for path, role in roles.role.items() if role == "moe.experts")]
    attention = roles.attention
    if isinstance(attention, AttentionSpec):
        ends = [path for path, _ in sch.mod.named_modules() if path.endswith(f".{attention.out}")]
        parts += [f"{path.removesuffix(attention.out)}{attention.module}" for path in ends]
    for path in parts:
        sch[path].level("block", required=False)
