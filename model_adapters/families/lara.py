"""Lara: positions in layers with a window; scores of experts in float32."""

from megasched.model_adapters.reading.attention import rotated_in_windows
from megasched.model_adapters.registry import Adapter, AttentionFacts, MoeFacts

ADAPTER = Adapter(
    model_types=("lara_mini",),
    attention=AttentionFacts(rotated=rotated_in_windows),
    moe=MoeFacts(float32=True, shared="shared_expert"),
)
