"""``megasched.verify`` of experts that expert parallelism shares out."""

import pytest

import megasched
from megasched import ConfigError, ParallelDims
from tests.lowering.models import tiny_model, token_ids


def _too_large(module, args, output):
    return output * 1.01


def _of_experts(layout, wrong=False):
    sch = megasched.create_schedule(tiny_model("mixtral"), layout, name="auto")
    if wrong:
        sch["model.layers.1.mlp.experts"].hook("fw_post", _too_large)
    return sch


@pytest.mark.parametrize(("sizes", "dp"), [({}, 2), ({"tensor_model_parallel_size": 2}, None)])
def test_experts_shared_out_over_ep(ranks, sizes, dp):
    layout = ParallelDims(expert_model_parallel_size=2, **sizes)
    ids = token_ids(batch=4)
    given = {"input_ids": ids, "labels": ids}
    right, wrong = (
        megasched.verify(_of_experts(layout, wrong), inputs=given, dp=dp, ranks=ranks) for wrong in (False, True)
    )
    assert right.verdict == "equal", right.why
    assert (wrong.verdict, wrong.finding.where) == ("wrong", "model.layers.1.mlp.experts")
    assert wrong.finding.error == pytest.approx(0.01, rel=1e-2)


def test_ep_without_ranks_to_share_experts_out_over():
    with pytest.raises(ConfigError, match=r"EP 2 shares experts out over TP x CP x DP, and .* has 1 such ranks"):
        megasched.verify(
            _of_experts(ParallelDims(expert_model_parallel_size=2)), inputs={"input_ids": token_ids()}
        )
