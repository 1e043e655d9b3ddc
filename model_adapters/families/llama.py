"""Llama, whose facts are the defaults of all families, and architectures with the same structure."""

from megasched.language.module_specs import MlpSpec
from megasched.model_adapters.registry import Adapter, AttentionFacts, LayerFacts

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
]
