"""When Megatron's own layer computes a mixture of experts, and what a plan says of it."""

from __future__ import annotations

import pytest

from megasched.errors import ScheduleError
from megasched.layout import Fp8, Layout
from megasched.megatron.session import open_session
from tests import tiny

TENSORWISE = Fp8(fp8_recipe="tensorwise")


def plan_of(folder, layout, schedule="auto", family="mixtral", **changes):
    return open_session(schedule, tiny.save(family, folder / "model", **changes), layout).plan


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (Layout(), None),
        (Layout(tensor_model_parallel_size=2, sequence_parallel=True), None),
        (Layout(tensor_model_parallel_size=2), "its mixture of experts wants sequence parallelism"),
        (
            Layout(tensor_model_parallel_size=4, sequence_parallel=True),
            "there are more TP ranks than heads of self_attn.k_proj",
        ),
        (Layout(packed_sequences=True), ""),  # of several rows, which would be one to Megatron's layer
    ],
)
def test_auto_takes_megatrons_layer_where_it_can(tmp_path, layout, reason):
    plan = plan_of(tmp_path, layout)
    layers = plan.structure.layer_paths()
    assert sorted(plan.blocks) == (sorted(layers) if reason is None else [])
    assert sorted(plan.not_blocks) == (sorted(layers) if reason else [])
    assert all(found.startswith(reason) for found in plan.not_blocks.values())


@pytest.mark.parametrize("path", ["model.layers", "model.layers.*", "model", "model.layers.1"])
def test_any_other_level_counts_more_than_autos(tmp_path, path):
    schedule = tmp_path / "fused.py"
    schedule.write_text(
        "from megasched.model_adapters.default_schedule import schedule as default\n\n\n"
        f"def schedule(sch, layout):\n    default(sch, layout)\n    sch['{path}'].level('fused')\n"
    )
    assert len(plan_of(tmp_path, Layout(), str(schedule)).blocks) == (3 if path.endswith("1") else 0)


def test_auto_leaves_layers_whose_modules_a_schedule_names(tmp_path):
    """One that adapts what would be inside of Megatron's layer needs no other level for it."""
    schedule = tmp_path / "adapted.py"
    schedule.write_text(
        "from megasched.model_adapters.default_schedule import schedule as default\n\n\n"
        "def schedule(sch, layout):\n    default(sch, layout)\n"
        '    sch["model.layers.1.self_attn.q_proj"].adapt(rank=2)\n'
    )
    plan = plan_of(tmp_path, Layout(), str(schedule))
    assert len(plan.blocks) == 3
    assert plan.not_blocks == {
        "model.layers.1": "the schedule calls adapt on self_attn.q_proj, which is gone then"
    }


def test_mlps_beside_mixtures_are_megatrons_too(tmp_path):
    plan = plan_of(tmp_path, Layout(), family="qwen3_moe", mlp_only_layers=[0, 2])
    assert len(plan.blocks) == 4


def test_experts_are_in_8_bits_where_their_sizes_fit(tmp_path):
    with pytest.raises(ScheduleError) as raised:
        plan_of(tmp_path, Layout(fp8=TENSORWISE), family="qwen3_moe")
    (problem,) = {problem.what for problem in raised.value.problems}  # the router is not in 8 bits
    assert problem.startswith("mlp.experts.down_proj is [32, 24]")
    plan = plan_of(tmp_path, Layout(fp8=TENSORWISE), family="qwen3_moe", moe_intermediate_size=32)
    assert len(plan.blocks) == 4
