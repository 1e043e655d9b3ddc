"""Nemotron: LayerNorm weights minus 1, an MLP without a gate; Nemotron-H: Mamba layers, DeepSeek-V3's experts."""

from megasched.language.module_specs import MlpSpec
from megasched.model_adapters.families.deepseek import EXPERTS
from megasched.model_adapters.registry import Adapter, AttentionFacts, LayerFacts

PROJECTIONS = {"q": "mixer.q_proj", "k": "mixer.k_proj", "v": "mixer.v_proj", "out": "mixer.o_proj"}

ADAPTER = [
    Adapter(
        model_types=("nemotron",),
        attention=AttentionFacts({"normalization": "LayerNorm", "zero_centered": True}),
        layer=LayerFacts({"mlp": MlpSpec(gate="")}),
    ),
    Adapter(
        model_types=("nemotron_h",),
        attention=AttentionFacts({"rotary": "", **PROJECTIONS}),
        moe=EXPERTS,
    ),
]
