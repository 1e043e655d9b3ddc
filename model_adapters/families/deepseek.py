"""DeepSeek: experts with sigmoid scores and a correction since V3 (arXiv 2412.19437), latent attention."""

from megasched.model_adapters.registry import Adapter, AttentionFacts, LayerFacts, MoeFacts

LATENT = AttentionFacts(mla=True)
# Other families have them, too.
EXPERTS = MoeFacts(
    scores="sigmoid",
    float32=True,
    correction="gate.e_score_correction_bias",
    scale="gate.routed_scaling_factor",
    shared="shared_experts",
)

ADAPTER = [
    Adapter(
        model_types=("deepseek_v2",),
        moe=MoeFacts(
            normalized=False,
            float32=True,
            scale="gate.routed_scaling_factor",
            best_of_group=1,
            shared="shared_experts",
        ),
    ),
    Adapter(model_types=("deepseek_v3",), attention=LATENT, layer=LayerFacts(), moe=EXPERTS),
    Adapter(model_types=("deepseek_v32",), moe=EXPERTS),
    # DeepSeek-V3's attention without its experts.
    Adapter(model_types=("youtu",), attention=LATENT, layer=LayerFacts()),
]
