"""ERNIE 4.5: neighbours are rotated together."""

from megasched.model_adapters.registry import Adapter, AttentionFacts, LayerFacts

NEIGHBOURS = AttentionFacts({"interleaved": True})

ADAPTER = [
    Adapter(model_types=("ernie4_5",), attention=NEIGHBOURS, layer=LayerFacts()),
    Adapter(model_types=("ernie4_5_moe",), attention=NEIGHBOURS),
]
