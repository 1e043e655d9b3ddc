"""Llama, whose facts are the defaults of all families, architectures with the same structure, and Llama 4."""

from megasched.language.module_specs import MlpSpec
from megasched.model_adapters.registry import Adapter, AttentionFacts, LayerFacts, MoeFacts

ADAPTER = [
    Adapter(
        model_types=("llama", "cwm", "internlm3", "iquestcoder", "seed_oss", "smollm3"),
        attention=AttentionFacts(),
        layer=LayerFacts(),
    ),
    Adapter(
        model_types=("arcee",),
        attention=AttentionFacts(),
        layer=LayerFacts({"mlp": MlpSpec(gate="")}),
    ),
    # Attention alone: what surrounds it is their own.
    Adapter(model_types=("apertus", "apertus1p5_text", "hyperclovax"), attention=AttentionFacts()),
    Adapter(
        model_types=("llama4", "llama4_text"),
        moe=MoeFacts(
            router="router",
            normalized=False,
            scores="sigmoid",
            shared="shared_expert",
            with_scores=True,
            flat=True,
        ),
    ),
]
