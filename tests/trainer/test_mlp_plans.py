"""When Megatron's own MLP stands for one in a layer that stays HF's, and what a plan says of it."""

from __future__ import annotations

import pytest

from megasched.errors import ScheduleError
from megasched.language.parallel_dims import Fp8, ParallelDims
from tests.trainer.test_mixture_plans import calls, plan_of

MLPS = [f"model.layers.{index}.mlp" for index in range(4)]


def test_auto_leaves_mlps_to_hf(tmp_path):
    assert not plan_of(tmp_path, ParallelDims(), family="gemma2").mlps


@pytest.mark.parametrize("sp", [False, True])
def test_an_mlp_is_taken_alone(tmp_path, sp):
    layout = ParallelDims(tensor_model_parallel_size=2, sequence_parallel=sp)
    plan = plan_of(tmp_path, layout, calls(tmp_path, ("model.layers.*.mlp", "block")), "gemma2")
    assert sorted(plan.mlps) == MLPS
    assert not plan.blocks
    assert all("self_attn" in paths[0] for paths in plan.fused_columns)


def test_of_a_layer_that_may_be_megatrons_the_mlp_is_taken_where_it_can_not(tmp_path):
    """In 8 bits auto takes layers; where a schedule names attention's modules, their MLPs."""
    schedule = tmp_path / "adapted.py"
    schedule.write_text(
        "from megasched.model_adapters.default_schedule import schedule as default\n\n\n"
        "def schedule(sch, layout):\n    default(sch, layout)\n"
        '    sch["model.layers.1.self_attn.q_proj"].adapt(rank=2)\n'
    )
    changes = {"hidden_size": 64, "intermediate_size": 96}
    plan = plan_of(tmp_path, ParallelDims(fp8=Fp8(fp8_recipe="tensorwise")), str(schedule), "llama", **changes)
    assert len(plan.blocks) == 3
    assert list(plan.mlps) == ["model.layers.1.mlp"]
    assert not any(".mlp." in path for path in plan.te_linears)
    assert "model.layers.1.mlp.down_proj.weight" in plan.weights_in_8_bits


@pytest.mark.parametrize(
    ("family", "changes", "call", "reason"),
    [
        ("gpt2", {"resid_pdrop": 0.1}, "transformer.h.*.mlp", "it drops out in training, and Megatron's does not"),
        (
            "llama",
            {"hidden_act": "quick_gelu"},
            "model.layers.*.mlp",
            "it computes something else than Megatron's",
        ),
    ],
)
def test_one_that_megatrons_can_not_stand_for_says_why(tmp_path, family, changes, call, reason):
    with pytest.raises(ScheduleError) as raised:
        plan_of(tmp_path, ParallelDims(), calls(tmp_path, (call, "block")), family, **changes)
    (what,) = {problem.what for problem in raised.value.problems}
    assert what == f"Megatron's MLP can't stand for this one: {reason}"


def test_a_shared_expert_in_a_region_around_it(tmp_path):
    """HF's mixture sends its input to all TP ranks by itself."""
    layout = ParallelDims(tensor_model_parallel_size=2, sequence_parallel=True)
    levels = (("model.layers", "fused"), ("model.layers.*.mlp.shared_expert", "block"))
    with pytest.raises(ScheduleError, match="what is around it communicates for it"):
        plan_of(tmp_path, layout, calls(tmp_path, *levels), "qwen2_moe")
    assert len(plan_of(tmp_path, ParallelDims(), calls(tmp_path, *levels), "qwen2_moe").mlps) == 4


def test_a_module_in_it_is_gone(tmp_path):
    schedule = calls(tmp_path, ("model.layers.*.mlp", "block"))
    with open(schedule, "a") as file:
        file.write("    sch['model.layers.0.mlp.up_proj'].hook('fw_post', print)\n")
    with pytest.raises(ScheduleError, match=r"the schedule calls hook on mlp\.up_proj, which is gone then"):
        plan_of(tmp_path, ParallelDims(), schedule, "gemma2")


@pytest.mark.parametrize("around", ["model.layers.0", "model"])
def test_operations_in_it_are_gone(tmp_path, around):
    """Of a graph of what is around it. A graph without edits inside of it has it as one call."""
    schedule = calls(tmp_path, ("model.layers.*.mlp", "block"))
    traced = f"    sch['{around}'].trace(leaves=['**.self_attn'])\n"
    with open(schedule, "a") as file:
        file.write(traced)
    assert sorted(plan_of(tmp_path, ParallelDims(), schedule, "gemma2").mlps) == MLPS
    with open(schedule, "a") as file:
        found = f"sch['{around}'].find_node(lambda node: 'mlp.mul' in node.name)[0]"
        file.write(f"    sch['{around}'].checkpoint({found})\n")
    with pytest.raises(ScheduleError, match="calls checkpoint on operations in it, which are gone then"):
        plan_of(tmp_path, ParallelDims(), schedule, "gemma2")
