"""When Megatron's own attention stands for one in a layer that stays HF's, and what a plan says of it."""

from __future__ import annotations

import pytest

from megasched.errors import ScheduleError
from megasched.language.parallel_dims import Fp8, ParallelDims
from megasched.trainer.session import open_session
from tests.parity.mixtures import small_model
from tests.trainer.test_mixture_plans import calls

ATTENTIONS = [f"model.layers.{index}.self_attn" for index in range(4)]


def plan_of(folder, layout, schedule="auto", family="llama", **changes):
    return open_session(schedule, small_model(family, str(folder / "model"), changes), layout).plan


def refusal(tmp_path, family, call, layout=None, **changes):
    """Why a schedule that asks for Megatron's attention is refused."""
    with pytest.raises(ScheduleError) as raised:
        plan_of(tmp_path, layout or ParallelDims(), calls(tmp_path, (call, "block")), family, **changes)
    (what,) = {problem.what for problem in raised.value.problems}
    return what.removeprefix("Megatron's attention can't stand for this one: ")


def test_auto_leaves_attention_to_hf(tmp_path):
    assert not plan_of(tmp_path, ParallelDims(), family="olmo").attentions


@pytest.mark.parametrize("sp", [False, True])
def test_attention_is_taken_alone(tmp_path, sp):
    layout = ParallelDims(tensor_model_parallel_size=2, sequence_parallel=sp)
    plan = plan_of(tmp_path, layout, calls(tmp_path, ("model.layers.*.self_attn", "block")), "llama")
    assert sorted(plan.attentions) == ATTENTIONS
    assert not plan.blocks | plan.mlps.keys()
    assert all(".mlp." in paths[0] for paths in plan.fused_columns)


def test_of_a_layer_that_is_not_megatrons_attention_and_mlp_are_taken(tmp_path):
    schedule = tmp_path / "preferred.py"
    schedule.write_text(
        "from megasched.model_adapters.default_schedule import schedule as default\n\n\n"
        "def schedule(sch, layout):\n    default(sch, layout)\n"
        '    sch["model.layers.*"].level("block", required=False)\n'
    )
    plan = plan_of(tmp_path, ParallelDims(), str(schedule), "granite")
    assert sorted(plan.attentions) == ATTENTIONS
    assert len(plan.mlps) == 4
    assert not plan.blocks
    assert set(map(str, plan.declined.values())) == {"no block is known for model type 'granite'"}


def test_in_8_bits_it_is_megatrons_linears_that_run_so(tmp_path):
    layout = ParallelDims(fp8=Fp8(fp8_recipe="tensorwise"))
    changes = {"hidden_size": 64, "intermediate_size": 96}
    schedule = calls(tmp_path, ("model.layers", "fused"), ("model.layers.*.self_attn", "block"))
    plan = plan_of(tmp_path, layout, schedule, "llama", **changes)
    assert sorted(plan.attentions) == ATTENTIONS
    assert plan.te_linears
    assert not any("self_attn" in path for path in plan.te_linears)
    assert "model.layers.0.self_attn.o_proj.weight" in plan.weights_in_8_bits


def test_soft_caps_are_not_megatrons(tmp_path):
    what = "attn_logit_softcapping is 50.0, and Megatron's layer computes what None does"
    assert refusal(tmp_path, "gemma2", "model.layers.*.self_attn") == what


def test_dropout_of_what_it_returns_is_not_megatrons(tmp_path):
    what = "it drops out what it returns, and Megatron's does not"
    assert refusal(tmp_path, "gpt2", "transformer.h.*.attn", resid_pdrop=0.1) == what


def test_attention_that_is_not_known(tmp_path):
    what = "no attention is known for model type 'olmo2'"
    assert refusal(tmp_path, "olmo2", "model.layers.*.self_attn") == what


def test_norms_of_each_head(tmp_path):
    what = "the weight of self_attn.q_norm is [4, 16], and Megatron's norms are of one head, alike for all"
    assert refusal(tmp_path, "cohere", "model.layers.*.self_attn", use_qk_norm=True) == what


def test_more_ranks_than_heads(tmp_path):
    what = "there are more TP ranks than heads of self_attn.k_proj"
    changes = {"num_key_value_heads": 1}
    layout = ParallelDims(tensor_model_parallel_size=2)
    assert refusal(tmp_path, "llama", "model.layers.*.self_attn", layout, **changes) == what


def test_a_module_in_it_is_gone(tmp_path):
    schedule = calls(tmp_path, ("model.layers.*.self_attn", "block"))
    with open(schedule, "a") as file:
        file.write("    sch['model.layers.0.self_attn.q_proj'].hook('fw_post', print)\n")
    with pytest.raises(ScheduleError, match=r"the schedule calls hook on self_attn\.q_proj, which is gone then"):
        plan_of(tmp_path, ParallelDims(), schedule, "llama")
