"""Decoder layers unlike Llama's by Megatron's ``TransformerLayer``, against the HF model.

Layer norms, weights of norms less 1, norms of what attention and the MLP give; other activations, and MLPs
without a gate; positions that are learned, or rotate neighbours; projections that lie otherwise.
"""

from __future__ import annotations

import pytest
import torch

from megasched.verify.parity import LAYOUTS as CHECKED
from megasched.verify.trainer_run import losses
from tests.parity.cases import refusal, slow, spread
from tests.parity.mixtures import LAYOUTS as OF_MIXTURES
from tests.parity.mixtures import small_model
from tests.parity.steps import assert_first_step_equals_hf, step_making
from tests.parity.test_levels import RECOMPUTE

LAYOUTS = {**CHECKED, **OF_MIXTURES}
TYPES = (
    *(
        "arcee",
        "biogpt",
        "ernie4_5",
        "exaone",
        "exaone4",
        "exaone_moe",
        "gemma",
        "gemma3_text",
        "glm",
        "glm4",
        "gpt2",
    ),
    *("helium", "hy_v3", "jais2", "nemotron", "opt", "persimmon", "stablelm", "starcoder2", "vaultgemma", "xglm"),
    "gpt_oss",
)
# Other names of what another type has, or a type that is among the variants below, too.
TWINS = ("arcee", "biogpt", "exaone", "gemma", "glm", "helium", "jais2", "stablelm", "starcoder2", "xglm")
MIXTURES = ("exaone_moe", "hy_v3", "gpt_oss")  # with TP, Megatron's want sequence parallelism


KIND = "megatron.core.transformer.transformer_layer:TransformerLayer"


def _check(ranks, folder, layout, schedule, layers=4):
    found = ranks.run(layout.world_size, step_making, folder, layout.flags.split(), schedule, KIND)
    stages = 2 if "pipeline" in layout.flags else 1
    assert [made for _, made in found] == [layers // stages] * layout.world_size
    assert_first_step_equals_hf(ranks, folder, [report for report, _ in found], layout.tp)


PLACES = {"gpt2": "transformer.h.*", "biogpt": "biogpt.layers.*", "opt": "model.decoder.layers.*"}


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        *(
            case
            for case in spread(TYPES, ("tp2-sp", "pp2-vpp2", "tp2", "tp2-sp-pp2-vpp2"), twins=TWINS)
            if case.values[0] not in MIXTURES or case.values[1] != "tp2"
        ),
        *((model_type, "cp2") for model_type in ("gemma3_text", "gpt_oss")),
        *(slow(model_type, "cp2") for model_type in ("nemotron", "glm4")),
        *(slow("gpt_oss", name) for name in ("one", "ep2-tp2-sp-dp2")),
    ],
)
def test_first_step_equals_hf(ranks, small_models, block, model_type, name):
    """Loss, logits, every gradient and the norm; weights of norms are not 1, and biases not 0."""
    schedule = block(PLACES.get(model_type, "model.layers.*"))
    _check(ranks, small_models(model_type), LAYOUTS[name], schedule)


VARIANTS = {
    "exact GELU, gated": ("llama", {"hidden_act": "gelu"}),
    "approximate GELU, gated": ("qwen3", {"hidden_act": "gelu_fast"}),
    "exact GELU and biases": ("gemma", {"hidden_act": "gelu", "attention_bias": True}),
    "approximate GELU without biases": ("starcoder2", {"use_bias": False}),
    "biases of norms and q, k, v": ("stablelm", {"use_qkv_bias": True}),
    "all biases": ("nemotron", {"attention_bias": True, "mlp_bias": True}),
    "no norms of heads": ("persimmon", {"qk_layernorm": False}),
    "a scale of attention": ("gpt2", {"scale_attn_weights": False}),
    "no window, and positions everywhere": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    ),
    "ReLU of a gate": ("glm4", {"hidden_act": "relu"}),
    "YaRN": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "frequencies that differ more": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_equal_hf(ranks, tmp_path, block, variant):
    model_type, changes = VARIANTS[variant]
    (folder,) = ranks.run(1, small_model, model_type, str(tmp_path / "model"), changes)
    schedule = block(PLACES.get(model_type, "model.layers.*"))
    _check(ranks, folder, LAYOUTS["tp2-sp"], schedule)


REFUSED = {
    "use_parallel_residual is True": ("stablelm", {"use_parallel_residual": True}),
    "q_proj is not sharded as a column": ("stablelm", {"qk_layernorm": True}),
    "hidden_dropout is 0.1": ("persimmon", {"hidden_dropout": 0.1}),
    "activation_dropout is 0.1": ("biogpt", {"activation_dropout": 0.1}),
    "do_layer_norm_before is False": ("opt", {"do_layer_norm_before": False}),
    "layers scale their attention differently": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "attn_logit_softcapping is 50.0": ("vaultgemma", {"attn_logit_softcapping": 50.0}),
    "use_bidirectional_attention is True": ("gemma3_text", {"use_bidirectional_attention": True}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_layers_that_are_not_megatrons_are_refused(tmp_path, block, reason):
    model_type, changes = REFUSED[reason]
    folder = small_model(model_type, str(tmp_path / "model"), changes)
    assert reason in refusal(block(PLACES.get(model_type, "model.layers.*")), folder)


@pytest.mark.parametrize("more", ["--sequence-parallel", slow("")])
def test_dropout_is_the_same_for_all_ranks_and_in_a_recompute(ranks, tmp_path, block, more):
    """Of what is added to the hidden state, which TP ranks share or have a part of, and of attention."""
    changes = {"resid_pdrop": 0.2, "attn_pdrop": 0.2}
    (folder,) = ranks.run(1, small_model, "gpt2", str(tmp_path / "model"), changes)
    flags = ["--tensor-model-parallel-size", "2", *more.split()]
    plain, again = (
        [report for report, _ in ranks.run(2, step_making, folder, chosen, block("transformer.h.*"), KIND)]
        for chosen in (flags, [*flags, *RECOMPUTE["full"].split()])
    )
    assert losses(again) == losses(plain)
    for own, recomputed in zip(plain, again, strict=True):
        for name, (gradient, placement) in own.gradients.items():
            assert torch.equal(gradient, recomputed.gradients[name][0]), name
            if not placement.sharded:
                assert torch.equal(gradient, plain[0].gradients[name][0]), name
    (without,) = ranks.run(1, small_model, "gpt2", str(tmp_path / "without"), {})
    found = ranks.run(2, step_making, without, flags, block("transformer.h.*"), KIND)
    assert losses(plain) != losses([report for report, _ in found])
