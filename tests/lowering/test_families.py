"""Every family at TP 2 under the schedule `auto`, against itself unscheduled in one process."""

import pytest

from tests.lowering.models import FAMILIES, tiny_model, token_ids
from tests.lowering.parity import compare_causal_lm
from tests.rank_pool import init_megatron

TOLERANCE = 1e-5


def _auto(family, tp, **overrides):
    from megasched.model_adapters.default_schedule import schedule

    init_megatron(tp=tp)
    model = tiny_model(family, **overrides)
    ids = token_ids()
    return compare_causal_lm(model, lambda sch: schedule(sch, sch.layout), {"input_ids": ids}, ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_every_gradient_equal_the_unscheduled_models(ranks, family):
    for found in ranks.run(2, _auto, family, 2):
        assert {name: gap for name, gap in found.items() if gap > TOLERANCE} == {}
