"""MLPs by Megatron's ``MLP`` in layers that stay HF's, against the HF model."""

from __future__ import annotations

from functools import partial

import pytest

from megasched.trainer.evidence.matrix import load_matrix
from megasched.verify.parity import LAYOUTS as CHECKED
from tests.parity.cases import slow, spread
from tests.parity.mixtures import LAYOUTS as OF_MIXTURES
from tests.parity.steps import (
    assert_first_step_equals_hf,
    assert_first_step_equals_hf_by_rounding,
    assert_goes_between_levels,
    step_making,
)

LAYOUTS = {**CHECKED, **OF_MIXTURES}
# Model type -> its MLPs, where they are not as Llama's.
PLACES = {
    "bamba": "model.layers.*.feed_forward",
    "ernie4_5_moe": "model.layers.*.mlp.shared_experts",
    "falcon": "transformer.h.*.mlp",
    "gpt2": "transformer.h.*.mlp",
    "gpt_neox": "gpt_neox.layers.*.mlp",
    "gptj": "transformer.h.*.mlp",
    "granitemoehybrid": "model.layers.*.shared_mlp",
    "lfm2": "model.layers.*.feed_forward",
    "recurrent_gemma": "model.layers.*.mlp_block",
}
TYPES = (
    *("bamba", "cohere", "falcon", "gemma2", "gpt_neox", "gptj", "granite", "granitemoehybrid"),
    *("gpt2", "lfm2", "llama", "nanochat", "olmo2", "phi", "phi3", "recurrent_gemma"),
)
# Of llama and falcon, but for names.
TWINS = ("bamba", "cohere", "gptj", "granite", "lfm2", "olmo2")


MLP = "megasched.layers.megatron.mlp:MegatronMlp"


def _check(ranks, folder, layout, schedule, mlps=4):
    found = ranks.run(layout.world_size, step_making, folder, layout.flags.split(), schedule, MLP)
    stages = 2 if "pipeline" in layout.flags else 1
    assert sum(made for _, made in found) == mlps * layout.world_size // stages
    assert_first_step_equals_hf(ranks, folder, [report for report, _ in found], layout.tp)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        *spread(TYPES, ("tp2-sp", "pp2-vpp2", "tp2", "tp2-sp-pp2-vpp2"), twins=TWINS),
        ("falcon", "cp2"),
        slow("gemma2", "cp2"),
        ("olmo2", "one"),
        ("ernie4_5_moe", "ep2"),
    ],
)
def test_first_step_equals_hf(ranks, small_models, block, model_type, name):
    """Loss, logits, every gradient and the norm."""
    schedule = block(PLACES.get(model_type, "model.layers.*.mlp"))
    mlps = 3 if model_type == "ernie4_5_moe" else 4  # its first layer has no experts
    _check(ranks, small_models(model_type), LAYOUTS[name], schedule, mlps)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["block", "fused"])
def test_a_checkpoint_goes_between_levels_and_layouts(ranks, small_models, block, tmp_path, first):
    """Gate and up are packed in Phi-3."""
    layouts = LAYOUTS["tp2-sp-pp2-vpp2"], LAYOUTS["one"]
    schedules = partial(block, "model.layers.*.mlp")
    assert_goes_between_levels(ranks, small_models("phi3"), schedules, first, layouts, tmp_path / "kept")


EVERY_MLP = """
from megasched.model_adapters.default_schedule import schedule as default

def schedule(sch, layout):
    default(sch, layout)
    for path in sch.roles.mlps:
        sch[path].level("block", required=False)
"""
MATRIX = load_matrix()["types"]
FACTS = {name: found.get("facts", {}).get("fused", ()) for name, found in MATRIX.items()}
# The linears lie in the layer itself; or the default schedule has taken whole layers; or experts are all that
# there is; or it is handed whole sequences, as shared experts are.
NONE_ALONE = (
    *("biogpt", "opt", "xglm", "mixtral", "qwen3_moe", "gpt_oss", "kolibri1", "hunyuan_v1_moe", "aria_text"),
    *("qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next", "zamba", "prophetnet", "xmod"),
    *("deepseek_v2", "deepseek_v3", "deepseek_v4", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite", "hy_v3"),
    *("llama4", "llama4_text", "moshi", "solar_open", "sarvam_moe", "lara_mini"),
)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name, fused in FACTS.items() if {"block", "mlp"} & set(fused)])
def test_every_architecture_with_such_mlps(ranks, small_models, tmp_path, model_type):
    """What the numbers of a small copy show holds in the trainer; rounding counts as in the matrix."""
    split = MATRIX[model_type]["tp2-sp"]["verdict"] == "equal"
    schedule = tmp_path / "schedule.py"
    schedule.write_text(EVERY_MLP)
    layout, folder = LAYOUTS["tp2-sp" if split else "tp2"], small_models(model_type)
    found = ranks.run(layout.world_size, step_making, folder, layout.flags.split(), str(schedule), MLP)
    assert_first_step_equals_hf_by_rounding(ranks, folder, [report for report, _ in found], layout.tp)
    assert all((made > 0) == (model_type not in NONE_ALONE) for _, made in found)
