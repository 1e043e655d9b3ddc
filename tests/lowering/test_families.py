"""Every family under the schedule `auto`, against itself unscheduled in one process."""

import pytest

from megasched.model_adapters.default_schedule import schedule
from tests.lowering.models import tiny_model, token_ids
from tests.lowering.parity import compare, too_far
from tests.rank_pool import init_megatron
from tests.tiny import FAMILIES


def _auto(sch):
    schedule(sch, sch.layout)


def _compare_family(family, tp, **changes):
    init_megatron(tp=tp)
    ids = token_ids()
    return compare(tiny_model(family, **changes), _auto, {"input_ids": ids, "labels": ids})


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_every_gradient_at_tp2(ranks, family):
    for found in ranks.run(2, _compare_family, family, 2):
        assert too_far(found) == {}
