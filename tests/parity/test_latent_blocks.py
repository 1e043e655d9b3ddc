"""Latent attention by Megatron's ``TransformerLayer`` and ``MLASelfAttention``, against the HF model."""

from __future__ import annotations

import pytest
import torch

from megasched.verify.ranks.pool import RankError
from tests.parity.cases import case, refusal
from tests.parity.instances import instances_of
from tests.parity.mixtures import LAYOUTS, mixtures_of_run, small_model
from tests.parity.steps import assert_first_step_equals_hf

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "original_max_position_embeddings": 8,
}
VARIANTS = {
    "no experts": ("youtu", {}, "tp2-sp"),
    "no experts, stages": ("youtu", {}, "tp2-sp-pp2-vpp2"),
    "no experts, contexts": ("youtu", {}, "cp2"),
    "YaRN that scales rotated parts and softmax": ("deepseek_v3", {"rope_parameters": YARN}, "ep2-tp2-sp"),
    "YaRN over contexts": ("deepseek_v3", {"rope_parameters": YARN}, "cp2"),
    "YaRN over contexts, experts shared out": ("deepseek_v3", {"rope_parameters": YARN}, "ep2-cp2"),
    "experts in groups": (
        "deepseek_v3",
        {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5},
        "ep2-tp2-sp",
    ),
    "another epsilon than the norms of layers": ("youtu", {"rms_norm_eps": 1e-3}, "tp2-sp"),
}


def _latent_layers_of_run(folder, flags, schedule):
    """A run of one step, and how many latent attentions of Megatron's this rank made."""
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    with instances_of(MLASelfAttention) as made:
        report, _ = mixtures_of_run(folder, flags, schedule)
    return report, len(made)


@pytest.mark.parametrize("variant", [case(one, fast="shared out" not in one) for one in VARIANTS])
def test_first_step_equals_hf(ranks, tmp_path, block, variant):
    model_type, changes, name = VARIANTS[variant]
    (folder,) = ranks.run(1, small_model, model_type, str(tmp_path / "model"), changes)
    layout = LAYOUTS[name]
    found = ranks.run(layout.world_size, _latent_layers_of_run, folder, layout.flags.split(), block())
    assert [made for _, made in found] == [2 if "pp2" in name else 4] * layout.world_size
    assert_first_step_equals_hf(ranks, folder, [report for report, _ in found], layout.tp)


@pytest.mark.parametrize(
    ("changes", "tp", "reason"),
    [
        ({}, 2, "its latent attention wants sequence parallelism"),
        ({"rope_interleave": False}, 1, "Megatron's latent attention rotates neighbours"),
        ({"q_lora_rank": None}, 1, "q is not compressed"),
        ({"attention_bias": True}, 1, "nothing is known of self_attn.q_a_proj.bias"),
    ],
)
def test_what_is_not_megatrons_is_refused(tmp_path, block, changes, tp, reason):
    folder = small_model("youtu", str(tmp_path / "model"), changes)
    assert reason in refusal(block(), folder, tensor_model_parallel_size=tp)


def _up_projections_of_run(folder, flags, schedule):
    """A run of one step, and which of this rank's latent attentions recompute their up projections."""
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    with instances_of(MLASelfAttention) as made:
        report, _ = mixtures_of_run(folder, flags, schedule)
    return report, [attention.recompute_up_proj for attention in made]


UP_PROJECTIONS = ["--recompute-granularity", "selective", "--recompute-modules", "mla_up_proj", "layernorm"]


@pytest.mark.parametrize("name", ["tp2-sp", "tp2-sp-pp2-vpp2"])
def test_recompute_of_up_projections_changes_no_bit(ranks, tmp_path, block, name):
    (folder,) = ranks.run(1, small_model, "youtu", str(tmp_path / "model"), {})
    layout = LAYOUTS[name]
    plain, again = (
        ranks.run(layout.world_size, _up_projections_of_run, folder, [*layout.flags.split(), *more], block())
        for more in ([], UP_PROJECTIONS)
    )
    for (one, kept), (other, recomputed) in zip(plain, again, strict=True):
        assert (set(kept), set(recomputed)) == ({False}, {True})
        assert one.losses == other.losses
        assert one.gradients.keys() == other.gradients.keys()
        for key, (gradient, _) in one.gradients.items():
            assert torch.equal(gradient, other.gradients[key][0]), key


def test_up_projections_that_are_not_there_are_refused(ranks, tmp_path, block):
    (folder,) = ranks.run(1, small_model, "youtu", str(tmp_path / "model"), {})
    with pytest.raises(RankError, match=r"mla_up_proj: no layer has latent attention of Megatron's"):
        ranks.run(1, mixtures_of_run, folder, UP_PROJECTIONS, block(level="fused"))
