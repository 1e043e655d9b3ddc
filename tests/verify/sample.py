"""Architectures across families, none of which has a line of code of its own: a sample of the matrix."""

# Model type -> what it is here for.
SAMPLE = {
    "bert": "encoder, post-norm, tuples, a head whose bias is tied elsewhere",
    "bart": "decoder of two stacks, a loss of its own, parameters that are not used",
    "bloom": "positions by ALiBi, layers that return tensors, residuals as arguments",
    "gptj": "parallel attention and MLP; a plan of HF's from transformers 5.24 on",
    "gpt_neo": "attention of its own, local layers",
    "stablelm": "two attributes that count heads, partial rotary",
    "falcon": "a subclass of Linear, outputs changed in place",
    "deepseek_v3": "latent attention, experts beside shared ones",
    "deepseek_v32": "sparse attention",
    "mixtral": "experts",
    "mamba": "no attention",
    "olmo2": "a norm over all heads",
}
