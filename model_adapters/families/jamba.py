"""Jamba: attention without positions beside Mamba layers; weights of experts are the scores themselves."""

from megasched.model_adapters.registry import Adapter, AttentionFacts, MoeFacts

ADAPTER = Adapter(
    model_types=("jamba",),
    attention=AttentionFacts({"rotary": ""}),
    moe=MoeFacts(router="router", normalized=False),
)
