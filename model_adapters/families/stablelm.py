"""StableLM: Llama with LayerNorm; Megatron's layer has no parallel residual, which the config can ask for."""

from megasched.model_adapters.registry import Adapter, AttentionFacts, LayerFacts

ADAPTER = Adapter(
    model_types=("stablelm",),
    attention=AttentionFacts({"normalization": "LayerNorm"}),
    layer=LayerFacts(),
)
