"""OLMo: attention as Llama's, unless q, k and v are clipped; experts as Qwen3-MoE's."""

from megasched.model_adapters.registry import Adapter, AttentionFacts, MoeFacts

ADAPTER = [
    Adapter(model_types=("olmo",), attention=AttentionFacts()),
    Adapter(model_types=("olmoe", "flex_olmo"), moe=MoeFacts()),
]
