"""StarCoder 2: LayerNorm, GPT-2's MLP, one window for all layers."""

from megasched.language.module_specs import MlpSpec
from megasched.model_adapters.registry import Adapter, AttentionFacts, LayerFacts

ADAPTER = Adapter(
    model_types=("starcoder2",),
    attention=AttentionFacts({"normalization": "LayerNorm"}, one_window=True),
    layer=LayerFacts({"mlp": MlpSpec(gate="", up="mlp.c_fc", down="mlp.c_proj")}),
)
