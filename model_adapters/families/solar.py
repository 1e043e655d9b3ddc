"""Solar Open: Llama's layers with DeepSeek-V3's experts."""

from megasched.model_adapters.families.deepseek import EXPERTS
from megasched.model_adapters.registry import Adapter, AttentionFacts, LayerFacts

ADAPTER = Adapter(
    model_types=("solar_open",),
    attention=AttentionFacts(),
    layer=LayerFacts(),
    moe=EXPERTS,
)
