"""Validation in micro-batches of another size than in training, where ranks send batches to each other."""

import pytest

from megasched.verify.ranks.pool import RankError
from tests import tiny
from tests.parity.validation import validate
from tests.patches.mended import run_without

VALIDATION = "--eval-iters 2 --eval-interval 1 --split 50,50,0 --eval-micro-batch-size"
TP2 = "--tensor-model-parallel-size 2"


@pytest.mark.parametrize("size", ["1", "4"])
def test_validation_loss_does_not_depend_on_the_micro_batch(ranks, tmp_path, size):
    model = tiny.save("llama", tmp_path / "llama")
    expected = ranks.run(1, validate, model, [*VALIDATION.split(), "2"])[0]
    found = ranks.run(2, validate, model, [*TP2.split(), *VALIDATION.split(), size])
    assert len(expected) >= 1
    for of_rank in found:
        assert of_rank == pytest.approx(expected, rel=1e-6)


def validate_unpatched(model, flags):
    with run_without("eval_batch"):
        return validate(model, flags)


def test_the_fault_is_still_there_without_the_patch(ranks, tmp_path):
    model = tiny.save("llama", tmp_path / "llama")
    with pytest.raises(RankError, match=r"\[4, 16\]|size|shape|Connection|Message"):
        ranks.run(2, validate_unpatched, model, [*TP2.split(), *VALIDATION.split(), "4"])
