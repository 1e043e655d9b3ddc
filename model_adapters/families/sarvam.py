"""Sarvam: GLM-4-MoE's layers; of the variant with latent attention only the experts are known."""

from megasched.model_adapters.families.deepseek import EXPERTS
from megasched.model_adapters.registry import Adapter, AttentionFacts, LayerFacts

ADAPTER = [
    Adapter(model_types=("sarvam_moe",), attention=AttentionFacts(), layer=LayerFacts(), moe=EXPERTS),
    Adapter(model_types=("sarvam_mla",), moe=EXPERTS),
]
