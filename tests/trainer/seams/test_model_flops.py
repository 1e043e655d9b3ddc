"""FLOPs in Megatron's log: the fault is there without the patch, and gone with it."""

import pytest

from megasched.trainer.seams import registry
from megasched.verify.trainer_run import SEQUENCE, train
from tests import tiny

BATCH = 8


def _counts(folder):
    """By Megatron's formula and by the patch, for one global batch."""
    train(folder, [], iterations=1)
    from megatron.training import training
    from megatron.training.global_vars import get_args

    patched = training.num_floating_point_operations(get_args(), BATCH)
    registry.undo("model_flops")
    return training.num_floating_point_operations(get_args(), BATCH), patched


def test_where_the_formula_is_right_both_agree(ranks, tmp_path):
    ((formula, patched),) = ranks.run(1, _counts, tiny.save("llama", tmp_path))
    assert patched == pytest.approx(formula, rel=0.02)  # the formula counts half a key less, and padded tokens


def test_a_window_is_counted_by_the_patch_alone(ranks, tmp_path):
    folder, wide = tiny.save("mistral", tmp_path / "a"), tiny.save("mistral", tmp_path / "b", sliding_window=None)
    ((formula, patched),) = ranks.run(1, _counts, folder)
    ((formula_of_all, patched_of_all),) = ranks.run(1, _counts, wide)
    assert formula == formula_of_all
    heads, width, layers, window = 4, 8, 4, 5
    left_out = sum(max(0, place + 1 - window) for place in range(SEQUENCE))
    assert patched_of_all - patched == 3 * BATCH * layers * 2 * heads * left_out * 2 * width


def test_without_a_session_the_formula_holds(monkeypatch):
    from megasched.trainer import current_session

    monkeypatch.setattr(current_session, "_current", [])
    registry.apply("model_flops")
    try:
        from megatron.training import training

        counted = training.num_floating_point_operations
        assert counted is not counted.__wrapped__
        monkeypatch.setattr("megatron.training.training.mpu", None, raising=False)
        with pytest.raises(AttributeError):
            counted(object(), 1)  # Megatron's own reads its flags off the arguments
    finally:
        registry.undo("model_flops")
