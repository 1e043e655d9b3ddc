"""``--iterations-to-skip``: the steps after it see the data that they see on one rank, whoever reads it."""

import pytest

from megasched.verify.ranks.pool import RankError
from megasched.verify.trainer_run import losses, train
from tests import tiny
from tests.patches.mended import run_without

SKIP = ["--iterations-to-skip", "2"]
CHUNKS = ["--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"]
LAYOUTS = [
    pytest.param(2, CHUNKS, id="chunks"),
    pytest.param(4, ["--pipeline-model-parallel-size", "4"], id="stages"),
    pytest.param(4, ["--tensor-model-parallel-size", "2", "--context-parallel-size", "2"], id="tp-cp"),
]


@pytest.mark.parametrize(("size", "layout"), LAYOUTS)
def test_the_steps_after_it_are_those_of_one_rank(ranks, tmp_path, size, layout):
    model = tiny.save("llama", tmp_path / "llama")
    (one,) = ranks.run(1, train, model, SKIP, iterations=3)
    assert len(one.losses) == 2
    found = ranks.run(size, train, model, [*SKIP, *layout], iterations=3)
    assert losses(found) == pytest.approx(one.losses, rel=1e-5)


def train_unpatched(*given, **named):
    with run_without("skipped_steps"):
        return train(*given, **named)


@pytest.mark.parametrize(("size", "layout"), LAYOUTS[:2])
def test_the_fault_is_still_there_without_the_patch(ranks, tmp_path, size, layout):
    model = tiny.save("llama", tmp_path / "llama")
    with pytest.raises(RankError, match="object is not an iterator"):
        ranks.run(size, train_unpatched, model, [*SKIP, *layout], iterations=3)
