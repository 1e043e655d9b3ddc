"""Mellum: Llama's attention, Qwen3-MoE's experts."""

from megasched.model_adapters.registry import Adapter, AttentionFacts, MoeFacts

ADAPTER = Adapter(
    model_types=("mellum",),
    attention=AttentionFacts(),
    moe=MoeFacts(),
)
