"""LoRA on top of what `auto` shards, for any model whose roles are known: adapters on the linears of attention,
everything else frozen. Other sizes: `--schedule-option rank=8 alpha=16`.
"""

from megasched.model_adapters.default_schedule import schedule as auto


def schedule(sch, layout, rank=16, alpha=32, dropout=0.05):
    auto(sch, layout)
    for role in ("qkv.*", "attn.out"):
        sch.role(role).adapt(rank=rank, alpha=alpha, dropout=dropout)
