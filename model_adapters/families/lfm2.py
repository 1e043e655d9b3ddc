"""LFM2: attention beside convolutions; experts chosen by sigmoid scores and a bias."""

from megasched.model_adapters.registry import Adapter, AttentionFacts, MoeFacts

OUT = {"out": "self_attn.out_proj"}

ADAPTER = [
    Adapter(model_types=("lfm2",), attention=AttentionFacts(OUT)),
    Adapter(
        model_types=("lfm2_moe",),
        attention=AttentionFacts({**OUT, "rotary": "model.pos_emb"}),
        moe=MoeFacts(
            scores="sigmoid",
            correction="expert_bias",
            scale="gate.routed_scaling_factor",
        ),
    ),
]
