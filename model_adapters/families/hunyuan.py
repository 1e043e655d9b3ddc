"""Hunyuan: Llama's layers, with experts of its own and, since version 3, DeepSeek-V3's under other names."""

from dataclasses import replace

from megasched.model_adapters.families.deepseek import EXPERTS
from megasched.model_adapters.registry import Adapter, AttentionFacts, LayerFacts, MoeFacts

ADAPTER = [
    Adapter(
        model_types=("hunyuan_v1_moe",),
        moe=MoeFacts(normalized=True, linear="gate.wg", float32=True, shared="shared_mlp"),
    ),
    Adapter(
        model_types=("hy_v3",),
        attention=AttentionFacts(),
        layer=LayerFacts(),
        moe=replace(
            EXPERTS,
            normalized=True,
            correction="e_score_correction_bias",
            scale="gate.router_scaling_factor",
        ),
    ),
]
