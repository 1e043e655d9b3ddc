"""OPT: attention views its heads by its own count. BioGPT and XGLM have the same layers (fairseq's names)."""

from megasched.language.module_specs import MlpSpec
from megasched.model_adapters.registry import Adapter, AttentionFacts, LayerFacts

# Learned positions are in the embedding.
ATTENTION = {"normalization": "LayerNorm", "rotary": "", "out": "self_attn.out_proj"}
LAYER = {
    "input_norm": "self_attn_layer_norm",
    "mlp_norm": "final_layer_norm",
    "mlp": MlpSpec(gate="", up="fc1", down="fc2"),
}
ADAPTER = [
    Adapter(
        model_types=("opt",),
        roles={
            "model.decoder.embed_tokens": "embed.tokens",
            "model.decoder.embed_positions": "embed.positions",
            "model.decoder.layers.*.self_attn.q_proj": "qkv.q",
            "model.decoder.layers.*.self_attn.k_proj": "qkv.k",
            "model.decoder.layers.*.self_attn.v_proj": "qkv.v",
            "model.decoder.layers.*.self_attn.out_proj": "attn.out",
            "model.decoder.layers.*.fc1": "mlp.up",
            "model.decoder.layers.*.fc2": "mlp.down",
            "lm_head": "head",
        },
        local_attributes={"model.decoder.layers.*.self_attn": ("num_heads",)},
        attention=AttentionFacts(ATTENTION),
        layer=LayerFacts(LAYER, dropout="dropout"),
    ),
    Adapter(
        model_types=("xglm",), attention=AttentionFacts(ATTENTION), layer=LayerFacts(LAYER, dropout="dropout")
    ),
    Adapter(
        model_types=("biogpt",),
        attention=AttentionFacts(ATTENTION, dropout="attention_probs_dropout_prob"),
        layer=LayerFacts(LAYER, dropout="hidden_dropout_prob"),
    ),
]
