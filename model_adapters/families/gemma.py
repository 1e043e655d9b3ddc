"""Gemma: norms store their weights minus 1; norms after attention and MLP since Gemma 2."""

from megasched.model_adapters.registry import Adapter, AttentionFacts, LayerFacts

ATTENTION = AttentionFacts({"zero_centered": True})

ADAPTER = [
    Adapter(model_types=("gemma",), attention=ATTENTION, layer=LayerFacts()),
    Adapter(model_types=("gemma2",), attention=ATTENTION),
    Adapter(
        model_types=("gemma3_text",),
        attention=ATTENTION,
        layer=LayerFacts(
            {
                "attention_post_norm": "post_attention_layernorm",
                "mlp_norm": "pre_feedforward_layernorm",
                "mlp_post_norm": "post_feedforward_layernorm",
            }
        ),
    ),
    Adapter(
        model_types=("vaultgemma",),
        attention=ATTENTION,
        layer=LayerFacts({"mlp_norm": "pre_feedforward_layernorm"}),
    ),
]
