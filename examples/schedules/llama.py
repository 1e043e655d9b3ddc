"""A schedule for Llama and everything shaped like it (Mistral, Qwen2, Qwen3, Gemma 2): copy it and change it.

The weight of a Linear is [out, in]: axis 0 cuts its outputs over the tensor-parallel ranks (a column), axis 1
its inputs (a row). A bias follows its weight. What must be communicated follows from that and is not written
here, nor is what becomes of the weights that stay whole (norms, Qwen3's q and k norms among them).
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
    # Along the vocabulary, as the embedding: where the two are tied, both must be cut alike.
    sch["lm_head"].shard("weight", axis=0)
