"""Expert parallelism: Megatron's trainer computes what HF computes in one process, whoever holds the experts."""

from __future__ import annotations

import pytest

from megasched.verify.parity import CheckedLayout, check_layout
from megasched.verify.ranks.pool import RankError
from tests.parity.cases import slow, spread
from tests.parity.steps import ADAM, SAVE, assert_first_step_equals_hf, assert_same_run, run

TYPES = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss", "llama4_text", "longcat_flash")
TWINS = (
    "qwen3_moe",
    "olmoe",
)  # of mixtral, whose experts have the same form; Llama 4's are batched, LongCat has some without parameters
EP2 = "--expert-model-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2"
LAYOUTS = {
    "ep2": CheckedLayout(2, 1, EP2),
    "ep2-dp4": CheckedLayout(4, 1, EP2),
    "ep2-tp2": CheckedLayout(2, 2, f"{EP2} {TP2}"),
    "ep4-tp2": CheckedLayout(4, 2, f"--expert-model-parallel-size 4 {TP2}"),
    "ep2-tp2-sp-dp2": CheckedLayout(4, 2, f"{EP2} {TP2} --sequence-parallel"),
    "ep2-pp2": CheckedLayout(4, 1, f"{EP2} --pipeline-model-parallel-size 2"),
}


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        *spread(TYPES, ("ep2", "ep2-pp2", "ep2-tp2-sp-dp2"), twins=TWINS),
        *spread(("mixtral", "gpt_oss", "llama4_text"), ("ep2-tp2", "ep4-tp2", "ep2-dp4")),
    ],
)
def test_first_step_equals_hf(ranks, small_models, block, model_type, name):
    """Loss, logits, every gradient and the norm, of all micro-batches; each rank holds its experts alone, and HF's
    code computes them."""
    layout = LAYOUTS[name]
    reports = run(ranks, small_models(model_type), layout, schedule=block("model.layers", "fused"))
    ep = 4 if name.startswith("ep4") else 2
    shared = [(shard, p) for r in reports for shard, p in r.gradients.values() if p.group == "ep"]
    # What LongCat's parameters have beyond their experts is shared out apart.
    assert {shard.shape[0] - sum(p.components[1:]) // ep for shard, p in shared} == {4 // ep}
    assert_first_step_equals_hf(ranks, small_models(model_type), reports, layout.tp)


@pytest.mark.parametrize("model_type", ["gpt_oss", slow("mixtral")])
def test_the_distributed_optimizer_takes_the_same_steps(ranks, small_models, model_type):
    """Three steps: weights, losses and norms of one process, from a state that lies over the expert groups."""
    one = run(ranks, small_models(model_type), CheckedLayout(1, 1, ""), iterations=3)
    for name in ("ep2", "ep2-dp4"):
        reports = run(ranks, small_models(model_type), LAYOUTS[name], *ADAM, iterations=3)
        assert_same_run(reports, one)


def test_a_checkpoint_of_shared_out_experts_resumes(ranks, small_models, tmp_path):
    """Written at EP2 x DP4, with the optimizer's states; EP2 x DP2 goes on as one process would.

    Without expert parallelism Megatron has one optimizer instead of two, and refuses the states of the other.
    """
    folder, one, kept = small_models("gpt_oss"), CheckedLayout(1, 1, ""), ["--load", str(tmp_path)]
    whole = run(ranks, folder, one, *SAVE, iterations=4)
    run(ranks, folder, LAYOUTS["ep2-dp4"], *SAVE, "--save", str(tmp_path), "--save-interval", "2", iterations=2)
    assert_same_run(run(ranks, folder, LAYOUTS["ep2"], *SAVE, *kept, iterations=4), whole, skip=2)
    weights_alone = run(ranks, folder, one, *SAVE, *kept, "--no-load-optim", iterations=3)
    assert weights_alone[0].losses[0] == pytest.approx(whole[0].losses[2], rel=2e-6)
    assert weights_alone[0].grad_norms[0] == pytest.approx(whole[0].grad_norms[2], rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--expert-tensor-parallel-size 2", "experts are shared out whole, not cut by features"),
        ("--expert-model-parallel-size 3", "each of the 1 pipeline stages has 2 ranks, which is no multiple of 3"),
    ],
)
def test_what_there_is_none_of_is_refused(ranks, small_models, flags, said):
    with pytest.raises(RankError, match=said):
        run(ranks, small_models("mixtral"), CheckedLayout(2, 1, flags))


def test_a_model_without_experts_is_refused(ranks, small_models):
    with pytest.raises(RankError, match="no module of the form that HF gives experts"):
        run(ranks, small_models("llama"), CheckedLayout(2, 1, EP2))


def test_the_layout_of_the_matrix(ranks, small_models):
    """JetMoE has experts, called in a way of their own; Llama has none."""
    found = {name: check_layout(ranks, small_models(name), "ep2") for name in ("qwen3_moe", "jetmoe", "llama")}
    assert {name: outcome.verdict for name, outcome in found.items()} == {
        "qwen3_moe": "equal",
        "jetmoe": "refused",
        "llama": "not applicable",
    }
    assert "no module of the form that HF gives experts" in found["jetmoe"].why
