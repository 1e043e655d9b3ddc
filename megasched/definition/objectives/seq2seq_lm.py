"""Defines sequence-to-sequence modelling (T5): the batch of ``pretrain_t5.py``, masks as in ``masked_lm.py``."""

from megasched.definition.objectives.objective import Objective

SEQ2SEQ_LM = Objective(
    "seq2seq_lm",
    "pretrain_t5",
    "AutoModelForSeq2SeqLM",
    "sequence-to-sequence language model",
    dict.fromkeys(("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask"), "int64"),
    constants={"use_cache": False},
)
