"""Defines causal language modelling (GPT, Llama), with the batch of ``pretrain_gpt.py``."""

from megasched.definition.objectives.objective import Objective

CAUSAL_LM = Objective(
    "causal_lm",
    "pretrain_gpt",
    "AutoModelForCausalLM",
    "causal language model",
    {"input_ids": "int64"},
    constants={"use_cache": False},
    predicts_next=True,
)
