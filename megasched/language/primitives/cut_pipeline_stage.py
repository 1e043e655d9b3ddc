"""Primitive ``cut_pipeline_stage``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megasched.language.registry import Node, Primitive, register_primitive


@register_primitive
class CutPipelineStage(Primitive):
    """Ends a pipeline stage after this layer; the next layer opens the next stage.

    Under interleaving (VPP) the cuts go through all PP x VPP chunks in the order in which a batch runs
    through them. Without any cut the layers are balanced by cost; Megatron's own flags for uneven stages
    and ``--pipeline-model-parallel-layout`` are honoured instead where they are given.

    Example: ``sch["model.layers.15"].cut_pipeline_stage()`` for 32 layers at PP 2.
    """

    name = "cut_pipeline_stage"
    aliases = ("pipeline_split",)
    phase = "plan"
    of_definition = True
    shown_by_effect = True

    def record(self, node: Node) -> Mapping[str, Any]:
        return {}
