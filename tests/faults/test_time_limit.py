"""``--exit-duration-in-mins``: a run saves and ends when its time is over, and another goes on from there."""

from __future__ import annotations

import torch

from megasched.verify.trainer_run import losses, train
from tests import tiny
from tests.faults.runs import SAVING, TP2, grad_norms, harmed, tracked

FLAGS = [*TP2, *SAVING]


def test_a_run_whose_time_is_over_saves_and_ends(ranks, tmp_path):
    """One rank's clock is enough."""
    model, save = tiny.save("llama", tmp_path / "model"), tmp_path / "ckpt"
    saving = [*FLAGS, "--save", str(save), "--save-interval", "100", "--exit-duration-in-mins", "30"]
    said = harmed(ranks, model, saving, 4, fault="began_an_hour_ago", rank=1)
    assert said.count("exiting program after") == 1
    assert said.count("SystemExit: 0") == 2
    assert [*grad_norms(said)] == [1]
    assert tracked(save) == "1"
    whole = ranks.run(2, train, model, FLAGS, iterations=4, as_it_is=True)
    resumed = ranks.run(2, train, model, [*FLAGS, "--load", str(save)], iterations=4, as_it_is=True)
    torch.testing.assert_close(losses(resumed), losses(whole)[1:], rtol=2e-6, atol=0)
