"""Embedding and head whose tables have other names: what Megatron does for both hangs on marks that they get."""

from __future__ import annotations

import pytest

from megasched.verify.trainer_run import gather, train
from tests import tiny
from tests.parity.steps import assert_same_losses

SCHEDULE = """
from torch import nn
from torch.nn import functional as F


class Table(nn.Module):
    def __init__(self, old):
        super().__init__()
        self.table = {table}

    def forward(self, ids):
        return F.embedding(ids, self.table)


def schedule(sch, layout):
    sch["model.embed_tokens"].replace(Table{weights})
    if layout.pp > 1:
        sch["model.layers.0"].cut_pipeline_stage()
"""
FORMS = {
    "the same one, tied": (True, "old.weight", ""),
    "a copy": (False, "nn.Parameter(old.weight.clone())", ', weights={"table": "weight"}'),
}
PP2 = "--pipeline-model-parallel-size 2"


@pytest.mark.parametrize("form", FORMS)
def test_the_decoupled_learning_rate_is_theirs(ranks, tmp_path, form):
    tied, table, weights = FORMS[form]
    folder = tiny.save("llama", tmp_path / "model", tie_word_embeddings=tied)
    (file := tmp_path / "table.py").write_text(SCHEDULE.format(table=table, weights=weights))
    flags = ["--decoupled-lr", "1e-2", "--decoupled-min-lr", "1e-3"]
    expected = ranks.run(1, train, folder, flags, iterations=3)
    found = ranks.run(2, train, folder, [*flags, *PP2.split()], iterations=3, schedule=str(file))
    assert_same_losses(found, expected)
    wanted, weights = gather(expected, "weights", 1), gather(found, "weights", 1)
    assert weights.keys() == wanted.keys()
    apart = {name: float((weights[name] - value).abs().max()) for name, value in wanted.items()}
    assert max(apart.values()) < 1e-5, apart
