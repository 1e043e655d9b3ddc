"""Llama and models shaped like it, for fine-tuning: heads and features over TP, whole layers recomputed.

Packed sequences are no matter of the schedule: every layer is told where they begin, whatever is cut.
"""


def schedule(sch, layout):
    sch["model.embed_tokens"].shard("weight", axis=0)
    for layer in sch["model.layers"]:
        attention, mlp = layer["self_attn"], layer["mlp"]
        for name in ("q_proj", "k_proj", "v_proj"):
            attention[name].shard("weight", axis=0)
        attention["o_proj"].shard("weight", axis=1)
        for name in ("gate_proj", "up_proj"):
            mlp[name].shard("weight", axis=0)
        mlp["down_proj"].shard("weight", axis=1)
        layer.checkpoint()
    sch["lm_head"].shard("weight", axis=0)
