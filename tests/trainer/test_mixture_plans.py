"""When Megatron's own layer computes a mixture of experts, and what a plan says of it."""

from __future__ import annotations

import pytest

from megasched.errors import ScheduleError
from megasched.language.parallel_dims import Fp8, ParallelDims
from megasched.trainer.session import open_session
from tests import tiny

TENSORWISE = Fp8(fp8_recipe="tensorwise")


def plan_of(folder, layout, schedule="auto", family="mixtral", **changes):
    return open_session(schedule, tiny.save(family, folder / "model", **changes), layout).plan


NEEDS_SP = "wants sequence parallelism where there are TP ranks"


@pytest.mark.parametrize(
    ("layout", "taken", "reasons"),
    [
        (ParallelDims(), "layers", set()),
        (ParallelDims(tensor_model_parallel_size=2, sequence_parallel=True), "layers", set()),
        (
            ParallelDims(tensor_model_parallel_size=2),
            "nothing",
            {f"its mixture of experts {NEEDS_SP}", f"it {NEEDS_SP}"},
        ),
        (
            ParallelDims(tensor_model_parallel_size=4, sequence_parallel=True),
            "mixtures",
            {"there are more TP ranks than heads of self_attn.k_proj"},
        ),
        (ParallelDims(packed_sequences=True), "mixtures", set()),  # several rows would be one to Megatron's layer
    ],
)
def test_auto_takes_megatrons_layer_where_it_can_and_its_mixture_elsewhere(tmp_path, layout, taken, reasons):
    plan = plan_of(tmp_path, layout)
    layers = plan.structure.layer_paths()
    assert sorted(plan.blocks) == (layers if taken == "layers" else [])
    assert sorted(plan.mixtures) == ([f"{layer}.mlp" for layer in layers] if taken == "mixtures" else [])
    assert set(map(str, plan.declined.values())) == reasons


OVERLAPPED = ParallelDims(tensor_model_parallel_size=2, sequence_parallel=True, tp_comm_overlap=True)


@pytest.mark.parametrize(
    ("family", "layout", "because"),
    [
        ("mixtral", ParallelDims(), "its experts"),
        ("mixtral", ParallelDims(packed_sequences=True), "its experts"),  # the mixture alone
        ("mixtral", ParallelDims(fp8=TENSORWISE), "8 bits"),
        ("llama", ParallelDims(fp8=TENSORWISE), "8 bits"),
        ("llama", OVERLAPPED, "--tp-comm-overlap"),
        ("llama", ParallelDims(), None),
    ],
)
def test_auto_says_for_what_it_takes_megatrons_layers(tmp_path, family, layout, because):
    plan = plan_of(tmp_path, layout, family=family)
    assert {record.arguments.get("because") for record in plan.records_of("level")} == {because} - {None}


@pytest.mark.parametrize("around", ["model.layers.*.mlp", "model.layers.1.mlp"])
def test_a_mixture_is_taken_alone_in_layers_that_are_to_stay(tmp_path, around):
    layout = ParallelDims(fp8=TENSORWISE)
    plan = plan_of(tmp_path, layout, calls(tmp_path, ("model.layers", "fused"), (around, "block")))
    assert not plan.blocks
    assert len(plan.mixtures) == (1 if "1" in around else 4)
    in_8_bits = {name.rpartition(".experts")[0] for name in plan.weights_in_8_bits if ".experts" in name}
    assert in_8_bits == plan.mixtures


@pytest.mark.parametrize("path", ["model.layers.1.self_attn.q_proj", "model.norm", "lm_head"])
def test_a_block_is_asked_for_on_what_can_be_one_or_around_it(tmp_path, path):
    """Outside of the layers, too: it would not be known that nothing came of the call."""
    what = "a block is a whole decoder layer, its attention, its mixture of experts or its MLP"
    with pytest.raises(ScheduleError, match=what):
        plan_of(tmp_path, ParallelDims(), calls(tmp_path, (path, "block")))


@pytest.mark.parametrize("path", ["", "model", "model.layers"])
def test_a_block_may_be_asked_for_around_layers(tmp_path, path):
    plan = plan_of(tmp_path, ParallelDims(), calls(tmp_path, (path, "block")))
    assert sorted(plan.blocks) == plan.structure.layer_paths()


@pytest.mark.parametrize(
    ("family", "changes", "layout", "reason"),
    [
        (
            "olmoe",
            {"output_router_logits": True},
            ParallelDims(),
            "output_router_logits adds a loss of HF's routers",
        ),
        ("olmoe", {"hidden_act": "gelu"}, ParallelDims(), "its activation is GELUActivation"),
        ("olmoe", {}, ParallelDims(tensor_model_parallel_size=2), f"it {NEEDS_SP}"),
        (
            "gpt_oss",
            {"swiglu_alpha": 1.5},
            ParallelDims(),
            "its activation has 1.5 (swiglu_alpha), and Megatron's 1.702",
        ),
        ("ernie4_5_moe", {}, ParallelDims(), "no mixture is known for model type 'ernie4_5_moe'"),
        (
            "deepseek_v2",
            {"n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy"},
            ParallelDims(),
            "HF's router finds groups by the best 1 scores in each, Megatron's by the best 2",
        ),
    ],
)
def test_a_mixture_that_megatrons_can_not_stand_for_says_why(tmp_path, family, changes, layout, reason):
    """And by ``auto`` it stays HF's."""
    schedule = calls(tmp_path, ("model.layers.*.mlp", "block"))
    with pytest.raises(ScheduleError) as raised:
        plan_of(tmp_path, layout, schedule, family, **changes)
    (what,) = {problem.what for problem in raised.value.problems}
    assert what.startswith(f"Megatron's mixture can't stand for this one: {reason}")
    assert not plan_of(tmp_path, layout, "auto", family, **changes).mixtures


def calls(folder, *levels):
    """A schedule file: everything by default, then calls of ``level``."""
    file = folder / "levels.py"
    lines = [f"    sch['{path}'].level('{level}')" for path, level in levels]
    file.write_text(
        "from megasched.model_adapters.default_schedule import schedule as default\n\n\n"
        "def schedule(sch, layout):\n    default(sch, layout)\n" + "\n".join(lines) + "\n"
    )
    return str(file)


@pytest.mark.parametrize("path", ["model.layers", "model.layers.*", "model", "model.layers.1"])
def test_any_other_level_counts_more_than_autos(tmp_path, path):
    plan = plan_of(tmp_path, ParallelDims(), calls(tmp_path, (path, "fused")))
    assert len(plan.blocks) == (3 if path.endswith("1") else 0)
    assert not plan.mixtures


def test_auto_leaves_layers_whose_modules_a_schedule_names(tmp_path):
    """One that adapts what would be inside of Megatron's layer needs no other level for it."""
    schedule = tmp_path / "adapted.py"
    schedule.write_text(
        "from megasched.model_adapters.default_schedule import schedule as default\n\n\n"
        "def schedule(sch, layout):\n    default(sch, layout)\n"
        '    sch["model.layers.1.self_attn.q_proj"].adapt(rank=2)\n'
    )
    plan = plan_of(tmp_path, ParallelDims(), str(schedule))
    assert len(plan.blocks) == 3
    assert plan.mixtures == {"model.layers.1.mlp"}
    reason = "the schedule calls adapt on self_attn.q_proj, which is gone then"
    declined = {path: str(one) for path, one in plan.declined.items()}
    assert declined == dict.fromkeys(("model.layers.1", "model.layers.1.self_attn"), reason)


def test_mlps_beside_mixtures_are_megatrons_too(tmp_path):
    plan = plan_of(tmp_path, ParallelDims(), family="qwen3_moe", mlp_only_layers=[0, 2])
    assert len(plan.blocks) == 4


def test_experts_are_in_8_bits_where_their_sizes_fit(tmp_path):
    with pytest.raises(ScheduleError) as raised:
        plan_of(tmp_path, ParallelDims(fp8=TENSORWISE), family="qwen3_moe")
    (problem,) = {problem.what for problem in raised.value.problems}  # the router is not in 8 bits
    assert problem.startswith("mlp.experts.down_proj is [32, 24]")
    plan = plan_of(tmp_path, ParallelDims(fp8=TENSORWISE), family="qwen3_moe", moe_intermediate_size=32)
    assert len(plan.blocks) == 4
