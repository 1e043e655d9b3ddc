"""Tokens that were masked, from those around them: BERT, RoBERTa, ALBERT. The batch of ``pretrain_bert.py``.

``attention_mask`` is 1 where there is a token and 0 where there is padding.
"""

from megasched.definition.objectives.objective import Objective

MASKED_LM = Objective(
    "masked_lm",
    "AutoModelForMaskedLM",
    "masked language model",
    {"input_ids": "int64", "attention_mask": "int64"},
)
