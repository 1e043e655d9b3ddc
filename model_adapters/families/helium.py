"""Helium: Llama's structure, but neighbours are rotated together."""

from megasched.model_adapters.registry import Adapter, AttentionFacts, LayerFacts

ADAPTER = Adapter(
    model_types=("helium",),
    attention=AttentionFacts({"interleaved": True}),
    layer=LayerFacts(),
)
