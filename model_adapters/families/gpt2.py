"""GPT-2: HF ``Conv1D`` layers; one of them computes q, k and v."""

from megasched.language.module_specs import MlpSpec
from megasched.model_adapters.registry import Adapter, AttentionFacts, LayerFacts

ADAPTER = Adapter(
    model_types=("gpt2",),
    roles={
        "transformer.wte": "embed.tokens",
        "transformer.wpe": "embed.positions",
        "transformer.h.*.attn.c_attn": "qkv.packed",
        "transformer.h.*.attn.c_proj": "attn.out",
        "transformer.h.*.mlp.c_fc": "mlp.up",
        "transformer.h.*.mlp.c_proj": "mlp.down",
        "lm_head": "head",
    },
    packed={"qkv.packed": lambda config: (config.hidden_size,) * 3},
    local_attributes={"transformer.h.*.attn": ("split_size", "num_heads")},
    attention=AttentionFacts(
        {"normalization": "LayerNorm", "rotary": "", "qkv": "attn.c_attn", "out": "attn.c_proj"},
        dropout="attn_pdrop",
        out_dropout="resid_pdrop",
    ),
    layer=LayerFacts(
        {
            "input_norm": "ln_1",
            "mlp_norm": "ln_2",
            "mlp": MlpSpec(gate="", up="mlp.c_fc", down="mlp.c_proj"),
        },
        dropout="resid_pdrop",
    ),
)
