"""GLM: neighbours are rotated together, gate and up are packed; GLM-4-MoE has DeepSeek-V3's kind of experts."""

from megasched.language.module_specs import MlpSpec
from megasched.model_adapters.families.deepseek import EXPERTS
from megasched.model_adapters.registry import Adapter, AttentionFacts, LayerFacts

NEIGHBOURS = AttentionFacts({"interleaved": True})
PACKED = {"mlp": MlpSpec(gate="", up="", gate_up="mlp.gate_up_proj")}
POST_NORMS = {"attention_post_norm": "post_self_attn_layernorm", "mlp_post_norm": "post_mlp_layernorm"}

ADAPTER = [
    Adapter(model_types=("glm",), attention=NEIGHBOURS, layer=LayerFacts(PACKED)),
    Adapter(model_types=("glm4",), attention=NEIGHBOURS, layer=LayerFacts({**PACKED, **POST_NORMS})),
    Adapter(model_types=("glm4_moe",), attention=AttentionFacts(), layer=LayerFacts(), moe=EXPERTS),
    Adapter(
        model_types=("glm4_moe_lite",),
        attention=AttentionFacts(mla=True),
        layer=LayerFacts(),
        moe=EXPERTS,
    ),
    Adapter(model_types=("glm_moe_dsa",), moe=EXPERTS),
]
