"""Experts in a list of which the code calls those that got tokens: no trial on meta meets them all."""

from __future__ import annotations

import pytest

from megasched.errors import ScheduleError
from megasched.language.parallel_dims import ParallelDims
from megasched.trainer.session import open_session
from megasched.verify.parity import compare
from megasched.verify.reference import hf_step
from megasched.verify.trainer_run import batches_of, train
from tests import remote
from tests.parity.cases import slow
from tests.parity.steps import assert_equal

MIXTURE = """
class Expert(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size)

    def forward(self, x):
        return self.norm(self.down(self.up(x).tanh()))


class Mlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.router = nn.Linear(config.hidden_size, 5, bias=False)
        self.experts = nn.ModuleList(Expert(config) for _ in range(5))

    def forward(self, h):
        x = h.flatten(0, 1)
        weights, chosen = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            row, place = torch.where(chosen == number)
            out = out.index_add(0, row, self.experts[number](x[row]) * weights[row, place, None])
        return out.view(h.shape)
"""
LAYOUTS = {
    "tp2-sp": (2, 2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "tp2": (2, 2, "--tensor-model-parallel-size 2"),
    "pp2": (2, 1, "--pipeline-model-parallel-size 2"),
}


@pytest.mark.parametrize("layout", ["tp2-sp", slow("tp2"), slow("pp2")])
def test_all_experts_have_whole_gradients(ranks, tmp_path, layout):
    folder, (world, tp, flags) = remote.write(tmp_path / "model", MIXTURE, num_hidden_layers=2), LAYOUTS[layout]
    reports = ranks.run(world, train, folder, [*flags.split(), "--trust-remote-code"], iterations=1)
    (expected,) = ranks.run(1, hf_step, folder, batches_of(reports), trust_remote_code=True)
    assert all(gradient.any() for gradient in expected.gradients.values())  # every expert got tokens
    assert_equal(compare(reports, expected, tp))


def test_experts_that_are_cut_and_that_no_trial_meets_are_refused(tmp_path):
    folder, schedule = remote.write(tmp_path / "model", MIXTURE, num_hidden_layers=2), tmp_path / "sched.py"
    schedule.write_text(
        "def schedule(sch, layout):\n"
        "    for layer in range(2):\n"
        "        for expert in range(5):\n"
        '            one = sch[f"model.layers.{layer}.mlp.experts.{expert}"]\n'
        '            one["up"].shard("weight", axis=0)\n'
        '            one["down"].shard("weight", axis=1)\n'
    )
    layout = ParallelDims(tensor_model_parallel_size=2)
    with pytest.raises(ScheduleError) as refused:
        _ = open_session(str(schedule), folder, layout, trust_remote_code=True).plan
    assert "no trial has met it" in str(refused.value)
    named = {problem.module for problem in refused.value.problems}
    # The first two are met: by the usual answer to which are chosen, and by another one.
    assert {f"model.layers.0.mlp.experts.{n}.{part}" for n in range(2, 5) for part in ("up", "down")} <= named
    assert not any(".experts.0" in path for path in named)
