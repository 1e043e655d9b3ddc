"""Aria: Llama's attention, Granite's experts and shared ones beside them."""

from megasched.model_adapters.registry import Adapter, AttentionFacts, MoeFacts

ADAPTER = Adapter(
    model_types=("aria_text",),
    attention=AttentionFacts(),
    moe=MoeFacts(router="router", normalized=True, shared="shared_experts"),
)
