"""Granite and Bamba: attention with its own scale; some have Mamba layers, some experts."""

from megasched.model_adapters.registry import Adapter, AttentionFacts, MoeFacts

EXPERTS = MoeFacts(router="router", normalized=True)

ADAPTER = [
    Adapter(model_types=("granite", "bamba"), attention=AttentionFacts()),
    Adapter(
        model_types=("granitemoe", "granitemoehybrid", "granitemoeshared"),
        attention=AttentionFacts(),
        moe=EXPERTS,
    ),
    Adapter(model_types=("granitemoe_swa",), moe=EXPERTS),
]
