"""dots.llm1: Llama's layers with DeepSeek-V3's experts."""

from megasched.model_adapters.families.deepseek import EXPERTS
from megasched.model_adapters.registry import Adapter, AttentionFacts, LayerFacts

ADAPTER = [
    Adapter(model_types=("dots1",), attention=AttentionFacts(), layer=LayerFacts(), moe=EXPERTS),
    Adapter(model_types=("dots3_note_text",), moe=EXPERTS),
]
