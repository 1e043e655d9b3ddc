"""StableLM: Llama with LayerNorm; a parallel residual, where the config asks for it, is its own."""

from megasched.model_adapters.registry import Adapter, AttentionFacts, LayerFacts

ADAPTER = Adapter(
    model_types=("stablelm",),
    attention=AttentionFacts({"normalization": "LayerNorm"}),
    layer=LayerFacts(),
)
