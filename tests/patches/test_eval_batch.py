"""Validation alone, and in micro-batches of another size than in training."""

import pytest

from megasched.definition.small_models.small_models import write_small_model
from megasched.verify.ranks.pool import RankError
from tests import tiny
from tests.families.cases import save
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


ALONE = "--eval-iters 2 --eval-interval 1 --split 50,50,0"


@pytest.mark.parametrize("layout", ["", "--bf16", TP2, "--pipeline-model-parallel-size 2"])
def test_validation_without_training_gives_the_loss_of_the_training_run(ranks, tmp_path, layout):
    """Megatron makes no gradient buffers for a model that is not trained."""
    world = 2 if "parallel" in layout else 1
    (model,) = ranks.run(1, write_small_model, "llama", str(tmp_path / "llama"))
    flags, save, alone = [*layout.split(), *ALONE.split()], str(tmp_path / "ckpt"), ["--skip-train"]
    from_weights = {"random_init": False}
    still = ranks.run(world, validate, model, [*flags, "--lr", "0", "--min-lr", "0"], **from_weights)[-1]
    assert ranks.run(world, validate, model, [*flags, *alone], **from_weights)[-1][0] == still[0]
    saved = ranks.run(world, validate, model, [*flags, "--lr", "0.1", "--save", save, "--save-interval", "1"])[-1]
    loaded = ranks.run(world, validate, model, [*flags, *alone, "--load", save])[-1]
    assert loaded[0] == saved[0]
    assert abs(loaded[0] - still[0]) > 1e-3


OF_SCRIPT = {
    "vit": ("pretrain_vision_classify", "--seq-length", "10", "--vocab-size", "5"),
    "bert": ("pretrain_bert",),
    "t5": ("pretrain_t5", "--decoder-seq-length", "12"),
}


@pytest.mark.parametrize("family", OF_SCRIPT)
def test_the_mock_data_of_each_script_come_in_micro_batches_of_validation(ranks, tmp_path, family):
    """Megatron's loader took those of training for data that do not say which split they are."""
    model, (script, *sizes) = save(family, tmp_path), OF_SCRIPT[family]
    of_size = {
        size: ranks.run(1, validate, model, [*sizes, *VALIDATION.split(), size], script=script)[0]
        for size in ("1", "2", "8")
    }
    assert len(of_size["2"]) >= 1
    for size in ("1", "8"):
        assert of_size[size] == pytest.approx(of_size["2"], rel=1e-6)
