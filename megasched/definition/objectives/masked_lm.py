"""Defines masked language modelling (BERT, RoBERTa, ALBERT), with the batch of ``pretrain_bert.py``.

The model predicts masked tokens. ``attention_mask`` is 1 for tokens and 0 for padding.
"""

from megasched.definition.objectives.objective import Objective

MASKED_LM = Objective(
    "masked_lm",
    "pretrain_bert",
    "AutoModelForMaskedLM",
    "masked language model",
    {"input_ids": "int64", "attention_mask": "int64"},
)
