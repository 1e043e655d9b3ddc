"""T5 under Megatron's trainer against plain Hugging Face: both stacks."""

from __future__ import annotations

import pytest

from megasched.definition.objectives import SEQ2SEQ_LM
from megasched.verify.ranks.pool import RankError
from megasched.verify.trainer_run import train
from tests.families.cases import check_first_step, save

FORMS = {
    "t5": {},
    "t5-v1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}
# The target is shorter than the source.
LENGTHS = ("--decoder-seq-length", "12")


@pytest.mark.parametrize(
    ("form", "layout"),
    [("t5", "one"), ("t5", "tp2"), ("t5", "tp2-sp"), ("t5", "dp2"), ("t5-v1.1", "tp2"), ("t5-v1.1", "tp2-sp")],
)
def test_first_step_equals_hf(ranks, tmp_path, form, layout):
    folder = save("t5", tmp_path, **FORMS[form])
    check_first_step(ranks, folder, SEQ2SEQ_LM, "pretrain_t5", layout, *LENGTHS)


def test_each_token_counts_as_much_where_the_loss_is_that_of_tokens(ranks, tmp_path):
    folder, flags = save("t5", tmp_path), (*LENGTHS, "--calculate-per-token-loss")
    check_first_step(ranks, folder, SEQ2SEQ_LM, "pretrain_t5", "dp2", *flags)


def test_an_encoder_decoder_is_not_cut_into_stages(ranks, tmp_path):
    folder = save("t5", tmp_path)
    flags = ["--pipeline-model-parallel-size", "2", *LENGTHS]
    with pytest.raises(RankError, match="the layers of an encoder-decoder are two lists"):
        ranks.run(2, train, folder, flags, iterations=1, script="pretrain_t5")
