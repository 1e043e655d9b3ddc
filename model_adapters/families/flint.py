"""Flint: attention with sinks, positions in layers with a window; experts chosen by sigmoid scores."""

from megasched.model_adapters.reading.attention import rotated_in_windows
from megasched.model_adapters.registry import Adapter, AttentionFacts, MoeFacts

ADAPTER = Adapter(
    model_types=("flint",),
    attention=AttentionFacts({"sinks": "self_attn.sinks"}, rotated=rotated_in_windows),
    moe=MoeFacts(scores="sigmoid", float32=True, shared="shared_expert"),
)
