"""``--exit-duration-in-mins``: a run saves and ends when its time is over, and another goes on from there."""

from __future__ import annotations

import torch

from megasched.verify.trainer_run import losses, train
from tests import tiny
from tests.faults.runs import SAVING, SECONDS, TP2, run, tracked

FLAGS = [*TP2, *SAVING]
SAID = "exiting program after"


def test_a_run_whose_time_is_over_saves_and_ends(ranks, tmp_path):
    """One rank's clock is enough."""
    model, save = tiny.save("llama", tmp_path / "model"), tmp_path / "ckpt"
    saving = [*FLAGS, "--hf-random-init", "--save", str(save), "--save-interval", "100", "--train-iters", "4"]
    ended = run(
        tmp_path, model, [*saving, "--exit-duration-in-mins", "30"], fault="began_an_hour_ago", rank=1, said=SAID
    )
    assert ended.status == 0
    assert ended.seconds < SECONDS
    assert [*ended.grad_norms] == [1]
    assert tracked(save) == "1"
    whole = ranks.run(2, train, model, FLAGS, iterations=4)
    resumed = ranks.run(2, train, model, [*FLAGS, "--load", str(save)], iterations=4)
    torch.testing.assert_close(losses(resumed), losses(whole)[1:], rtol=2e-6, atol=0)
