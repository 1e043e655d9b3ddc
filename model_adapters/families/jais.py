"""Jais 2: LayerNorm, and an MLP without a gate."""

from megasched.language.module_specs import MlpSpec
from megasched.model_adapters.registry import Adapter, AttentionFacts, LayerFacts

ADAPTER = Adapter(
    model_types=("jais2",),
    attention=AttentionFacts({"normalization": "LayerNorm"}),
    layer=LayerFacts({"mlp": MlpSpec(gate="")}),
)
