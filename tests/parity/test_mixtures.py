"""Mixtures of experts by Megatron's own ``MoELayer`` in layers that stay HF's, against the HF model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from tests.model_adapters.facts import facts_of
from tests.parity.cases import case, spread
from tests.parity.mixtures import LAYOUTS, mixtures_of_run
from tests.parity.steps import (
    assert_first_step_equals_hf,
    assert_first_step_equals_hf_by_rounding,
    assert_goes_between_levels,
)

# Types whose whole layers are Megatron's are in test_mixture_blocks.py and test_layer_kinds.py, but for gpt-oss.
FACTS = facts_of("moe")
TYPES = sorted(set(FACTS) - set(facts_of("layer")))


def kind_of(facts):
    """What a mixture computes, under whatever names its modules have."""
    named = {field: bool(getattr(facts, field)) for field in ("router", "linear", "correction", "scale", "shared")}
    return repr(replace(facts, **named))


# They come to `make test`.
ONE_OF_EACH_KIND = {kind_of(FACTS[model_type]): model_type for model_type in TYPES}.values()
# What these compute besides is further than 1e-5 from HF in float32 at some layouts, with HF's mixtures too: by
# rounding, as float64 tells. The last has no sequence parallelism.
ROUNDED = ("lara_mini", "qwen3_next", "qwen3_5_moe_text", "qwen4_exp_text")
SOME = ("olmoe", "minimax_m2", "gpt_oss", "llama4_text")
OTHER_LAYOUTS = ("one", "tp2-sp", "ep2-tp2-sp-dp2", "ep2-cp2", "ep2-pp2", "tp2-sp-pp2-vpp2")


def layout_of(model_type):
    return "ep2" if model_type in ROUNDED else "ep2-tp2-sp"


def mixtures_and_definition(folder, flags, schedule):
    """``mixtures_of_run``, and how many experts each mixture of the definition has."""
    from megasched.definition.build import build_definition, load_config
    from megasched.definition.experts import find_experts

    found = mixtures_of_run(folder, flags, schedule)
    return *found, list(find_experts(build_definition(load_config(folder))).values())


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        *(case(one, layout_of(one), fast=one in ONE_OF_EACH_KIND and one not in SOME) for one in TYPES),
        *spread(SOME, OTHER_LAYOUTS),
    ],
)
def test_first_step_equals_hf(ranks, small_models, model_type, name):
    """Loss, logits, every gradient and the norm; ``auto`` takes Megatron's mixture for each of the model's."""
    layout, folder = LAYOUTS[name], small_models(model_type)
    found = ranks.run(layout.world_size, mixtures_and_definition, folder, layout.flags.split(), "auto")
    share = 2 if name.startswith("ep2") else 1
    stages = 2 if "pp2" in name else 1
    made = [count for _, of_rank, _ in found for count in of_rank]
    assert made == [count // share for count in found[0][2]] * (layout.world_size // stages)
    reports = [report for report, *_ in found]
    if model_type not in ROUNDED:
        return assert_first_step_equals_hf(ranks, folder, reports, layout.tp)
    return assert_first_step_equals_hf_by_rounding(ranks, folder, reports, layout.tp)


@pytest.mark.slow  # mixture_blocks has one that is not
@pytest.mark.parametrize("first", ["block", "fused"])
@pytest.mark.parametrize("model_type", ["gpt_oss", "minimax_m2"])
def test_a_checkpoint_goes_between_levels_and_layouts(ranks, small_models, block, tmp_path, model_type, first):
    """Experts, routers and the optimizer's states, in HF's names and layout: one has buffers in its routers, the
    other transposed experts."""
    layouts = LAYOUTS["ep4-tp2-sp-dp2"], LAYOUTS["ep2"]
    schedules = partial(block, "model.layers.*.mlp")
    assert_goes_between_levels(ranks, small_models(model_type), schedules, first, layouts, tmp_path / "kept")
