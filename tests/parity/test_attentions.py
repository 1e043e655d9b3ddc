"""Attention by Megatron's ``SelfAttention`` in layers that stay HF's, against the HF model."""

from __future__ import annotations

from functools import partial

import pytest

from megasched.trainer.evidence.matrix import load_matrix
from megasched.verify.parity import LAYOUTS as CHECKED
from tests.model_adapters.facts import facts_of
from tests.parity.cases import slow, spread
from tests.parity.mixtures import LAYOUTS as OF_MIXTURES
from tests.parity.mixtures import small_model
from tests.parity.steps import assert_first_step_equals_hf_by_rounding, assert_goes_between_levels, step_making

LAYOUTS = {**CHECKED, **OF_MIXTURES}
# Of the four layers of a small model, those with attention, where some have something else.
LAYERS_WITH = {"jamba": 2, "lara_mini": 2, "lfm2": 2, "qwen3_next": 1}
KIND = "megasched.layers.megatron.attention:MegatronAttention"
MATRIX = load_matrix()["types"]
# Attention alone, whatever else the layers have; where the default schedule takes whole layers, it is told not to.
ATTENTION = """
from megasched.model_adapters.default_schedule import schedule as default

def schedule(sch, layout):
    default(sch, layout)
    attention = sch.roles.attention
    for path, _ in sch.mod.named_modules():
        if path.endswith(f".{attention.out}"):
            layer = path.removesuffix(f".{attention.out}")
            sch[layer].level("fused")
            sch[f"{layer}.{attention.module}"].level("block")
"""


@pytest.fixture
def attention_alone(tmp_path):
    """A schedule with Megatron's attention in every layer that has attention, and nothing else of Megatron's."""
    schedule = tmp_path / "schedule.py"
    schedule.write_text(ATTENTION)
    return str(schedule)


def folder_of(ranks, small_models, tmp_path, model_type):
    """Of a small model whose attention Megatron's can stand for."""
    if model_type == "gemma2":
        changes = {"attn_logit_softcapping": None}
        return ranks.run(1, small_model, model_type, str(tmp_path / "model"), changes)[0]
    return small_models(model_type)


def _check(ranks, folder, layout, schedule, *more):
    """Loss, logits, every gradient and the norm, where rounding counts as in the matrix; how many modules of
    attention each rank has made."""
    flags = [*layout.flags.split(), *more]
    found = ranks.run(layout.world_size, step_making, folder, flags, schedule, KIND)
    assert_first_step_equals_hf_by_rounding(ranks, folder, [report for report, _ in found], layout.tp)
    return [made for _, made in found]


TYPES = ("apertus1p5_text", "cohere2", "gpt_neox", "granite", "lara_mini", "lfm2", "llama", "phi", "qwen3_next")


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        *spread(TYPES, ("tp2-sp", "pp2-vpp2", "tp2", "tp2-sp-pp2-vpp2"), twins=("apertus1p5_text", "granite")),
        slow("qwen3", "tp2"),
        ("flint", "cp2"),
        *(slow(model_type, "cp2") for model_type in ("jamba", "cohere2", "qwen3_next")),
        ("olmo", "one"),
        ("ernie4_5_moe", "tp2-sp"),
    ],
)
def test_first_step_equals_hf(ranks, small_models, attention_alone, model_type, name):
    layout = LAYOUTS[name]
    made = _check(ranks, small_models(model_type), layout, attention_alone)
    stages = 2 if "pipeline" in layout.flags else 1
    assert sum(made) == LAYERS_WITH.get(model_type, 4) * layout.world_size // stages


def test_selective_recompute(ranks, small_models, attention_alone):
    """Of the core of attention, as Megatron's own layers do it; there is none of HF's."""
    flags = "--recompute-granularity selective --recompute-modules core_attn"
    made = _check(ranks, small_models("granite"), LAYOUTS["tp2-sp"], attention_alone, *flags.split())
    assert made == [4, 4]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(facts_of("attention")))
def test_every_architecture_with_such_attention(ranks, small_models, attention_alone, tmp_path, model_type):
    split = MATRIX[model_type]["tp2-sp"]["verdict"] == "equal"
    folder = folder_of(ranks, small_models, tmp_path, model_type)
    assert all(_check(ranks, folder, LAYOUTS["tp2-sp" if split else "tp2"], attention_alone))


@pytest.mark.parametrize("first", ["block", slow("fused")])
def test_a_checkpoint_goes_between_levels_and_layouts(ranks, small_models, block, tmp_path, first):
    """K and v have fewer heads, and heads have norms."""
    layouts = LAYOUTS["tp2-sp-pp2-vpp2"], LAYOUTS["one"]
    schedules = partial(block, "model.layers.*.self_attn")
    assert_goes_between_levels(ranks, small_models("qwen3"), schedules, first, layouts, tmp_path / "kept")
