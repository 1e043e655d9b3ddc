"""A schedule for GPT-2, by roles: the adapter says which module does what, in every architecture alike."""


def schedule(sch, layout):
    sch.role("embed.tokens").shard("weight", axis=0)
    # HF's Conv1D keeps its weight as [in, out], so columns are axis 1 and rows axis 0.
    # q, k and v are packed into one projection; the adapter knows their sizes.
    sch.role("qkv.packed").shard("weight", axis=1)
    sch.role("attn.out").shard("weight", axis=0)
    sch.role("mlp.up").shard("weight", axis=1)
    sch.role("mlp.down").shard("weight", axis=0)
    # Tied to the embedding, so cut like it; a Linear, so [out, in] again.
    sch.role("head").shard("weight", axis=0)
    # Every second layer is computed again in the backward pass: half the layers keep only their input.
    sch["transformer.h"][::2].checkpoint()
