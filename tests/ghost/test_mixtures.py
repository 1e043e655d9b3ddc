"""Mixtures of experts on ghost GPUs with Transformer Engine; tokens are spread evenly over the experts."""

import pytest

from tests.ghost.process import INTEGERS
from tests.ghost.runs import EP2, LENGTH, TP2, train, write_model

WHOLE = "--expert-tensor-parallel-size 1"
LEVELS = ("fused", "block")
CASES = {
    **{level: (level, 1, "") for level in LEVELS},
    **{f"{level}, ep2": (level, 2, EP2) for level in LEVELS},
    **{f"{level}, ep2 x tp2 + sp": (level, 4, f"{EP2} {TP2} {WHOLE}") for level in LEVELS},
}

pytestmark = pytest.mark.slow
with_te = pytest.mark.usefixtures("transformer_engine")


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("mixtral"), "mixtral")


@with_te
@pytest.mark.parametrize("case", CASES)
def test_a_mixture_trains_and_its_ranks_agree(mixtral, case):
    level, ranks, flags = CASES[case]
    run = train(mixtral, level, flags.split(), ranks=ranks, te=True, length=LENGTH, **INTEGERS)
    assert run.faults() == []
