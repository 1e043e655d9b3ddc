"""Qwen: experts, with a shared one except in Qwen3-MoE; gated attention since Qwen3-Next."""

from dataclasses import replace

from megasched.model_adapters.registry import Adapter, AttentionFacts, LayerFacts, MoeFacts

GATED = AttentionFacts({"zero_centered": True, "gated": True})
SHARED = MoeFacts(shared="shared_expert", shared_gate="shared_expert_gate")

ADAPTER = [
    Adapter(model_types=("qwen2", "qwen3"), attention=AttentionFacts(), layer=LayerFacts()),
    Adapter(model_types=("qwen2_moe",), attention=AttentionFacts(), layer=LayerFacts(), moe=SHARED),
    Adapter(
        model_types=("qwen3_moe",),
        attention=AttentionFacts(one_window=True),
        layer=LayerFacts(),
        moe=MoeFacts(),
    ),
    Adapter(model_types=("qwen3_next",), attention=GATED, moe=SHARED),
    Adapter(model_types=("qwen3_5_text",), attention=GATED),
    Adapter(model_types=("qwen3_5_moe_text",), attention=GATED, moe=replace(SHARED, normalized=True)),
    Adapter(model_types=("qwen4_exp_text",), moe=SHARED),
]
