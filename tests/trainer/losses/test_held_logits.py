"""Hooks on the head hold the logits as they were, though Megatron's loss writes into what it is given."""

from __future__ import annotations

import pytest

from megasched.verify.trainer_run import train
from tests import tiny

SCHEDULE = """
from megasched.model_adapters.default_schedule import schedule as default
from tests.trainer.losses.test_held_logits import HELD


def schedule(sch, layout):
    default(sch, layout)
    sch["lm_head"].hook("fw_post", lambda module, args, output: HELD.append((output, output.detach().clone())))
    sch["lm_head"].hook("bw_post", lambda module, of_input, of_output: HELD.append((of_output[0], None)))
"""
HELD = []


def hooked(folder, flags, schedule):
    """In a rank: the losses, whether each output was as it had been, and the shapes of the gradients."""
    HELD.clear()
    report = train(folder, flags, iterations=1, schedule=schedule)
    as_it_was = [output.equal(then) for output, then in HELD if then is not None]
    return report.losses, as_it_was, [tuple(gradient.shape) for gradient, then in HELD if then is None]


@pytest.mark.parametrize("vocabulary", [96, 99], ids=["even", "padded"])
def test_outputs_and_gradients(ranks, tmp_path, vocabulary):
    folder = tiny.save("llama", tmp_path / "model", vocab_size=vocabulary)
    (file := tmp_path / "hooks.py").write_text(SCHEDULE)
    flags = ["--vocab-size", str(vocabulary - 1), "--tensor-model-parallel-size", "2"]
    expected = ranks.run(2, train, folder, flags, iterations=1)
    for losses, as_it_was, gradients in ranks.run(2, hooked, folder, flags, str(file)):
        assert losses == pytest.approx(expected[0].losses, rel=1e-6)
        assert as_it_was == [True] * 4
        assert len(gradients) == 4
