"""Layers with experts by Megatron's own ``TransformerLayer`` and ``MoELayer``, against the HF model."""

from __future__ import annotations

import pytest
import torch

from megasched.verify.trainer_run import losses
from tests.parity.cases import case, refusal, slow, spread
from tests.parity.mixtures import LAYOUTS, mixtures_of_run, small_model
from tests.parity.steps import ADAM, SAVE, assert_first_step_equals_hf, assert_same_run, run

SOME = ("ep2-tp2-sp", "one", "cp2", "tp2-sp-pp2-vpp2")
OF_MIXTRAL = ("ep2-tp2-sp-dp2", "ep2-cp2")
OTHERS = (
    "qwen3_moe",
    "qwen2_moe",
    "dots1",
    "glm4_moe",
    "sarvam_moe",
    "solar_open",
    "deepseek_v3",
    "glm4_moe_lite",
)
# Their mixtures are those of others here, or are among the variants below.
TWINS = ("qwen3_moe", "sarvam_moe", "solar_open", "glm4_moe_lite")
# Layers of these that are not mixtures.
DENSE = {"dots1": 1, "glm4_moe": 1, "sarvam_moe": 1, "deepseek_v3": 1, "glm4_moe_lite": 1}


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        *(case("mixtral", name, fast=name in OF_MIXTRAL) for name in LAYOUTS),
        *spread(OTHERS, SOME, twins=TWINS),
        *(slow(model_type, name) for model_type in OTHERS for name in ("ep2-tp2-sp-dp2", "ep2-cp2")),
    ],
)
def test_first_step_equals_hf(ranks, small_models, block, model_type, name):
    """Loss, logits, every gradient and the norm; each rank has its experts alone, and Megatron's router."""
    layout = LAYOUTS[name]
    folder = small_models(model_type)
    found = ranks.run(layout.world_size, mixtures_of_run, folder, layout.flags.split(), block())
    experts = 4 // int(name[2]) if name.startswith("ep") else 4
    layers = 4 - DENSE.get(model_type, 0)
    made = [count for _, of_rank in found for count in of_rank]
    assert made == [experts] * (layers * layout.world_size // (2 if "pp2" in name else 1))
    assert_first_step_equals_hf(ranks, folder, [report for report, _ in found], layout.tp)


VARIANTS = {
    "weights that do not add up to one": ("qwen3_moe", {"norm_topk_prob": False}, 4),
    "weights that do": ("qwen3_moe", {"norm_topk_prob": True}, 4),
    "an MLP in some layers": ("qwen3_moe", {"mlp_only_layers": [1]}, 3),
    "a window": ("mixtral", {"sliding_window": 5}, 4),
    "a window that is switched on": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 5}, 4),
    "attention bias": ("qwen3_moe", {"attention_bias": True}, 4),
    "one expert of each token": ("mixtral", {"num_experts_per_tok": 1}, 4),
    "weights of sigmoids as they are": (
        "dots1",
        {"norm_topk_prob": False, "num_experts_per_tok": 1, "n_group": 1},
        3,
    ),
    "shared experts beside weights that do not add up": ("qwen2_moe", {"norm_topk_prob": False}, 4),
}


# Of attention, whose bias is in tests/parity/test_levels.py.
@pytest.mark.parametrize("variant", [slow(one) if one == "attention bias" else one for one in VARIANTS])
def test_variants_equal_hf(ranks, tmp_path, block, variant):
    model_type, changes, layers = VARIANTS[variant]
    (folder,) = ranks.run(1, small_model, model_type, str(tmp_path / "model"), changes)
    layout = LAYOUTS["ep2-tp2-sp"]
    found = ranks.run(2, mixtures_of_run, folder, layout.flags.split(), block())
    assert [made for _, made in found] == [[2] * layers] * 2
    assert_first_step_equals_hf(ranks, folder, [report for report, _ in found], layout.tp)


MIXED = """
from megasched.model_adapters.default_schedule import schedule as default


def schedule(sch, layout):
    default(sch, layout)
    sch["model.layers"].level("leaf")
    sch["model.layers.0"].level("block")
"""


def test_the_next_layer_can_take_a_view_of_the_hidden_state(ranks, small_models, tmp_path):
    """Megatron's has [s, b, h], and the definition's router takes a view of [b, s, h] for its tokens."""
    folder = small_models("mixtral")
    (tmp_path / "mixed.py").write_text(MIXED)
    reports = run(ranks, folder, LAYOUTS["one"], schedule=str(tmp_path / "mixed.py"))
    assert_first_step_equals_hf(ranks, folder, reports, 1)


@pytest.mark.parametrize("name", ["ep2-tp2-sp-dp2", slow("ep2"), slow("tp2-sp-pp2-vpp2")])
def test_the_distributed_optimizer_takes_the_same_steps(ranks, small_models, block, name):
    one = run(ranks, small_models("mixtral"), LAYOUTS["one"], iterations=3, schedule=block(level="fused"))
    reports = run(ranks, small_models("mixtral"), LAYOUTS[name], *ADAM, iterations=3, schedule=block())
    assert_same_run(reports, one, tp=LAYOUTS[name].tp)


@pytest.mark.parametrize("first", ["block", slow("fused")])
def test_a_checkpoint_goes_between_levels_and_layouts(ranks, small_models, block, tmp_path, first):
    """Each expert is written by itself and read with the others, and the other way round; the optimizer's states
    too."""
    folder, kept = small_models("qwen3_moe"), ["--load", str(tmp_path / "kept")]
    second = "fused" if first == "block" else "block"
    whole = run(ranks, folder, LAYOUTS["ep2"], *SAVE, iterations=4, schedule=block(level="fused"))
    saving = ["--save", str(tmp_path / "kept"), "--save-interval", "2"]
    wide = LAYOUTS["ep4-tp2-sp-dp2"]
    run(ranks, folder, wide, *SAVE, *saving, iterations=2, schedule=block(level=first))
    resumed = run(ranks, folder, LAYOUTS["ep2"], *SAVE, *kept, iterations=4, schedule=block(level=second))
    assert_same_run(resumed, whole, skip=2)


@pytest.mark.slow
def test_a_checkpoint_of_whole_experts_goes_between_levels(ranks, small_models, block, tmp_path):
    """Where all TP ranks have all experts, one of them writes each."""
    folder, kept = small_models("mixtral"), ["--load", str(tmp_path)]
    whole = run(ranks, folder, LAYOUTS["one"], *SAVE, iterations=4, schedule=block(level="fused"))
    saving = ["--save", str(tmp_path), "--save-interval", "2"]
    run(ranks, folder, LAYOUTS["tp2-sp"], *SAVE, *saving, iterations=2, schedule=block())
    resumed = run(ranks, folder, LAYOUTS["dp2"], *SAVE, *kept, iterations=4, schedule=block(level="fused"))
    assert_same_run(resumed, whole, skip=2)


RECOMPUTE = {
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "moe": "--recompute-granularity selective --recompute-modules moe core_attn",
    "layernorm": "--recompute-granularity selective --recompute-modules layernorm moe_act --moe-grouped-gemm",
}


@pytest.mark.parametrize("name", RECOMPUTE)
def test_recompute_changes_no_bit(ranks, small_models, block, name):
    layout, folder = LAYOUTS["ep2-tp2-sp"], small_models("mixtral")
    plain = run(ranks, folder, layout, schedule=block())
    again = run(ranks, folder, layout, *RECOMPUTE[name].split(), schedule=block())
    assert losses(again) == losses(plain)
    for one, other in zip(plain, again, strict=True):
        for key, (gradient, _) in one.gradients.items():
            assert torch.equal(gradient, other.gradients[key][0]), key


@pytest.mark.parametrize(
    ("tp", "changes", "reason"),
    [
        (2, {}, "its mixture of experts wants sequence parallelism"),
        (1, {"output_router_logits": True}, "output_router_logits adds a loss of HF's routers"),
        (1, {"router_jitter_noise": 0.1}, "router_jitter_noise changes what HF's routers see"),
    ],
)
def test_mixtures_that_are_not_megatrons_are_refused(tmp_path, block, tp, changes, reason):
    folder = small_model("mixtral", str(tmp_path / "model"), changes)
    assert reason in refusal(block(), folder, tensor_model_parallel_size=tp)
