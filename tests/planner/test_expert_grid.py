"""Experts have a grid of ranks of their own: which layouts there are, what groups span, what is reduced."""

from __future__ import annotations

import pytest
import torch
from megatron.core.parallel_state import RankGenerator
from transformers import Qwen3MoeConfig

from megasched.language.parallel_dims import Fp8, ParallelDims
from megasched.planner.groups import groups_of
from megasched.planner.hardware.hardware import load_hardware
from megasched.planner.measure.parameter_counts import Count, ParameterCounts
from megasched.planner.search import Job, _groups, _layouts
from megasched.planner.step_time import _exposed_seconds
from megasched.trainer.session import open_session
from megasched.trainer.stages.stage import Stage
from tests.planner.configs import config_of

H100 = load_hardware("h100-80gb")
# Qwen3-235B-A22B
SHAPE = {
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "vocab_size": 151936,
}


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    Qwen3MoeConfig(**SHAPE).save_pretrained(folder)
    return open_session("auto", str(folder), ParallelDims())


def looked_at(opened, gpus):
    job = Job(opened.with_layout, H100, gpus, 4096, 2048)
    for group in _groups(job, 1):
        if group.tp == 2 and group.ep in (32, 64):
            yield from _layouts(job, group, opened.with_layout(group))


@pytest.mark.parametrize(("gpus", "pp", "ep"), [(256, 8, 32), (64, 1, 64)])
def test_published_layouts_of_qwen3_are_looked_at(opened, gpus, pp, ep):
    """EP is above DP there: the TP ranks of a stage hold experts, too."""
    found = [one for one in looked_at(opened, gpus) if (one.pp, one.ep) == (pp, ep)]
    assert found
    assert all(one.data_parallel_size == gpus // pp // 2 < ep for one in found)
    assert all(one.expert_data_parallel_size == gpus // pp // ep for one in found)


def test_experts_are_shared_out_in_each_stage(opened):
    """64 ranks have no 64 experts' ranks in each of two stages."""
    found = {(one.pp, one.ep) for one in looked_at(opened, 64)}
    assert {(1, 64), (2, 32)} <= found
    assert (2, 64) not in found


@pytest.mark.parametrize("layout", [(2, 1, 4, 2, 1), (2, 2, 8, 4, 2), (1, 2, 2, 4, 1), (4, 1, 2, 1, 2)])
def test_groups_are_megatrons(layout):
    tp, cp, ep, dp, pp = layout
    made = ParallelDims(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        data_parallel_size=dp,
        pipeline_model_parallel_size=pp,
    )
    order = {"pp": pp, "order": "tp-cp-ep-dp-pp"}
    dense = RankGenerator(tp=tp, cp=cp, ep=1, dp=dp, **order)
    experts = RankGenerator(tp=1, cp=1, ep=ep, dp=tp * cp * dp // ep, **order)
    ranks = {
        "TENSOR_MODEL_PARALLEL_GROUP": dense.get_ranks("tp"),
        "CONTEXT_PARALLEL_GROUP": dense.get_ranks("cp"),
        "DATA_PARALLEL_GROUP_WITH_CP": dense.get_ranks("dp-cp"),
        "EXPERT_MODEL_PARALLEL_GROUP": experts.get_ranks("ep"),
        "EXPERT_DATA_PARALLEL_GROUP": experts.get_ranks("dp"),
    }
    groups = groups_of(made)
    assert groups.keys() == ranks.keys()
    for name, group in groups.items():
        first = ranks[name][0]
        assert group.ranks == len(first), name
        assert group.ranks == 1 or group.span == len(first) * (first[1] - first[0]), name


def test_neighbours_that_hold_all_experts_are_in_one_node():
    """EP8 next to TP2: within a node of eight, though TP x EP is sixteen."""
    layout = ParallelDims(tensor_model_parallel_size=2, expert_model_parallel_size=8, data_parallel_size=8)
    assert H100.link(groups_of(layout)["EXPERT_MODEL_PARALLEL_GROUP"].span) == H100.node


def test_gradients_of_experts_are_reduced_over_the_ranks_that_hold_the_same():
    layout = ParallelDims(tensor_model_parallel_size=2, expert_model_parallel_size=8, data_parallel_size=8)
    size, dtypes = 10**9, (torch.bfloat16, torch.float32)
    dense, experts = (
        _exposed_seconds([], H100, count, layout, dtypes, sharded=True)
        for count in (Count(dense=size), Count(experts=size))
    )
    sent = size * (4 + 2)  # gradients in float32, parameters in 16 bits
    link = H100.network  # 16 ranks
    assert dense == pytest.approx(link.seconds(sent * 7 / 8), rel=1e-3)  # DP 8
    assert experts == pytest.approx(link.seconds(sent * 1 / 2), rel=1e-3)  # TP 2 x DP 8 / EP 8
    everywhere = ParallelDims(tensor_model_parallel_size=2, expert_model_parallel_size=8, data_parallel_size=4)
    assert _exposed_seconds([], H100, Count(experts=size), everywhere, dtypes, sharded=True) == 0.0


def test_without_a_distributed_optimizer_gradients_are_summed_on_every_rank():
    """Twice what a rank sends of them, and no parameters are gathered."""
    layout, dtypes = ParallelDims(data_parallel_size=16), (torch.bfloat16, torch.float32)
    count = Count(dense=10**9)
    found = [_exposed_seconds([], H100, count, layout, dtypes, sharded=sharded) for sharded in (False, True)]
    assert found[0] / found[1] == pytest.approx(2 * 4 / (4 + 2), rel=1e-3)


@pytest.mark.parametrize("ep", [1, 2])
def test_weights_of_experts_are_kept_in_8_bits_beside(tmp_path, ep):
    """Megatron's grouped linears, for each expert: gate and up, and down; not the router's weight."""
    config = config_of("mixtral")
    config.save_pretrained(tmp_path)
    path = tmp_path / "block.py"
    path.write_text(
        "from megasched.model_adapters.default_schedule import schedule as default\n\n"
        "def schedule(sch, layout):\n    default(sch, layout)\n    sch['model.layers.*'].level('block')\n"
    )
    layout = ParallelDims(expert_model_parallel_size=ep, data_parallel_size=ep, fp8=Fp8(fp8_recipe="tensorwise"))
    session = open_session(str(path), str(tmp_path), layout)
    hidden, width = config.hidden_size, config.head_dim
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    attention = hidden * width * (2 * heads + 2 * groups)
    experts = config.num_local_experts // ep * 3 * hidden * config.intermediate_size
    count = ParameterCounts(session).held([Stage(1, 2, False, False)])
    assert count.quantized == attention + experts
