"""Primitive ``sync_batch_norm``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megasched.errors import Problem
from megasched.language.registry import Node, Primitive, register_primitive


@register_primitive
class SyncBatchNorm(Primitive):
    """Has all batch norms in this module, or this one, take their statistics of the samples of all DP ranks.

    A batch over several data-parallel ranks is then normalized as one process would normalize it, with the same
    running statistics. Without it each rank normalizes its own samples, as torch's DDP does. Over TP nothing need
    be shared: a rank has all values of its channels. As torch's ``convert_sync_batchnorm`` does, it takes a whole
    model; other than torch's, it runs on CPUs too, and over Megatron's data-parallel group.

    Example: ``sch.sync_batch_norm()``
    """

    name = "sync_batch_norm"
    one_call_in_graph = "always"

    def record(self, node: Node) -> Mapping[str, Any]:
        return {}

    def check(self, node: Node, arguments: Mapping[str, Any], source: str) -> list[Problem]:
        kinds = [{base.__name__ for base in type(module).__mro__} for module in node.mod.modules()]
        if any("SyncBatchNorm" in names for names in kinds):
            what = "torch's SyncBatchNorm is in it, which shares statistics among all ranks of a group of its own"
            return [Problem(what, node.path, source, "leave convert_sync_batchnorm out")]
        if any("_BatchNorm" in names for names in kinds):
            return []
        return [Problem("there is no batch norm in it", node.path, source, "a module with batch norms")]
