"""gpt-oss: attention with sinks, experts with biases whose mixture returns scores, too."""

from megasched.model_adapters.registry import Adapter, AttentionFacts, LayerFacts, MoeFacts

ADAPTER = Adapter(
    model_types=("gpt_oss",),
    attention=AttentionFacts({"sinks": "self_attn.sinks"}),
    layer=LayerFacts(),
    moe=MoeFacts(router="router", normalized=True, with_scores=True),
)
