"""BERT, RoBERTa and ALBERT by masked tokens, under Megatron's trainer, against plain Hugging Face."""

from __future__ import annotations

import pytest

from megasched.definition.objectives import MASKED_LM
from megasched.verify.ranks.pool import RankError
from megasched.verify.trainer_run import train
from tests.families.cases import LAYOUTS, check_first_step, save

CASES = [
    *(("bert", layout) for layout in LAYOUTS),
    *(("roberta", layout) for layout in ("one", "tp2-sp", "pp2")),
    *(("albert", layout) for layout in ("one", "tp2", "dp2")),
]


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_first_step_equals_hf(ranks, tmp_path, family, layout):
    check_first_step(ranks, save(family, tmp_path), MASKED_LM, "pretrain_bert", layout)


def test_each_token_counts_as_much_where_the_loss_is_that_of_tokens(ranks, tmp_path):
    folder = save("bert", tmp_path)
    check_first_step(ranks, folder, MASKED_LM, "pretrain_bert", "dp2", "--calculate-per-token-loss")


REFUSED = {
    "--pipeline-model-parallel-size 2": "they are called more than once",
    "--tensor-model-parallel-size 2 --sequence-parallel": "sequence parallelism splits the hidden state",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_shared_layers_can_not_do_is_refused(ranks, tmp_path, flags):
    folder = save("albert", tmp_path)
    with pytest.raises(RankError, match=REFUSED[flags]):
        ranks.run(2, train, folder, flags.split(), iterations=1, script="pretrain_bert")
