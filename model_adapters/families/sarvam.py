"""Sarvam: GLM-4-MoE's layers; another has latent attention of which nothing is known."""

from megasched.model_adapters.families.deepseek import EXPERTS
from megasched.model_adapters.registry import Adapter, AttentionFacts, LayerFacts

ADAPTER = [
    Adapter(model_types=("sarvam_moe",), attention=AttentionFacts(), layer=LayerFacts(), moe=EXPERTS),
    Adapter(model_types=("sarvam_mla",), moe=EXPERTS),
]
