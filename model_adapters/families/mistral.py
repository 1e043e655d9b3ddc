"""Mistral: one window for all layers, where there is one; Mixtral has experts."""

from megasched.model_adapters.registry import Adapter, AttentionFacts, LayerFacts, MoeFacts

ADAPTER = [
    Adapter(model_types=("ministral",), attention=AttentionFacts(), layer=LayerFacts()),
    Adapter(model_types=("mistral",), attention=AttentionFacts(one_window=True), layer=LayerFacts()),
    Adapter(
        model_types=("mixtral",),
        attention=AttentionFacts(one_window=True),
        layer=LayerFacts(),
        moe=MoeFacts(normalized=True),
    ),
]
