"""Llama, Mistral, Qwen2 and Qwen3 with Megatron's own TransformerLayer in the place of each decoder layer.

Embedding, final norm and head stay the definition's, sharded as by default. Checkpoints keep HF's names and
shapes, so that a run can change between this and any other schedule.
"""

from megasched.model_adapters.default_schedule import schedule as default


def schedule(sch, layout):
    default(sch, layout)
    sch["model.layers.*"].level("block")
