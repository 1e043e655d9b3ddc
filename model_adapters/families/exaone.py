"""EXAONE: since its fourth generation only layers with a window have positions, and norms come after."""

from megasched.model_adapters.families.deepseek import EXPERTS
from megasched.model_adapters.reading.attention import rotated_in_windows
from megasched.model_adapters.registry import Adapter, AttentionFacts, LayerFacts

ATTENTION = AttentionFacts(rotated=rotated_in_windows)

ADAPTER = [
    Adapter(model_types=("exaone",), attention=AttentionFacts(), layer=LayerFacts()),
    Adapter(
        model_types=("exaone4",),
        attention=ATTENTION,
        layer=LayerFacts(
            {
                "input_norm": "",
                "mlp_norm": "",
                "attention_post_norm": "post_attention_layernorm",
                "mlp_post_norm": "post_feedforward_layernorm",
            }
        ),
    ),
    Adapter(model_types=("exaone_moe",), attention=ATTENTION, layer=LayerFacts(), moe=EXPERTS),
]
