"""What the tests of mixtures by Megatron's own layers have in common: layouts, small models, a run of one step."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megasched.definition.small_models.shrink import TOKENS
from megasched.definition.small_models.small_models import small_config, write_model
from megasched.verify.parity import CheckedLayout
from megasched.verify.trainer_run import train
from tests.parity.instances import instances_of
from tests.parity.steps import RUN

EP2, TP2_SP = "--expert-model-parallel-size 2", "--tensor-model-parallel-size 2 --sequence-parallel"
LAYOUTS = {
    "one": CheckedLayout(1, 1, ""),
    "dp2": CheckedLayout(2, 1, ""),
    "ep2": CheckedLayout(2, 1, EP2),
    "cp2": CheckedLayout(2, 1, "--context-parallel-size 2"),
    "tp2-sp": CheckedLayout(2, 2, TP2_SP),
    "ep2-tp2-sp": CheckedLayout(2, 2, f"{EP2} {TP2_SP}"),
    "ep2-tp2-sp-dp2": CheckedLayout(4, 2, f"{EP2} {TP2_SP}"),
    "ep4-tp2-sp-dp2": CheckedLayout(4, 2, f"--expert-model-parallel-size 4 {TP2_SP}"),
    "ep2-pp2": CheckedLayout(4, 1, f"{EP2} --pipeline-model-parallel-size 2"),
    "ep2-cp2": CheckedLayout(4, 1, f"{EP2} --context-parallel-size 2"),
    "tp2-sp-pp2-vpp2": CheckedLayout(
        4, 2, f"{TP2_SP} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
    ),
}


# What of small models is changed, so that they do all they can and are Megatron's.
CHANGES = {
    "dots1": {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 2, "topk_group": 1},
    "glm4_moe": {"routed_scaling_factor": 2.5, "attention_bias": True, "use_qk_norm": True},
    "qwen2_moe": {"norm_topk_prob": True},
    "vaultgemma": {"attn_logit_softcapping": None},
    "starcoder2": {"sliding_window": 5},
    "gemma3_text": {"query_pre_attn_scalar": 7},
}


def small_model(model_type, folder, changes):
    """Writes a small model; where its routers have corrections, they change what is chosen."""
    config = small_config(model_type)
    for field, value in {**CHANGES.get(model_type, {}), **changes}.items():
        setattr(config, field, value)
    written = Path(write_model(config, folder)) / "model.safetensors"
    tensors = load_file(written)
    for name, value in tensors.items():
        if name.endswith(
            ("e_score_correction_bias", "expert_bias")
        ):  # zeros, as HF makes them: they would change no choice
            tensors[name] = torch.linspace(-0.3, 0.3, value.numel()).reshape(value.shape)
    save_file(tensors, written, metadata={"format": "pt"})
    return folder


def mixtures_of_run(folder, flags, schedule):
    """A run of one step, and the mixtures of Megatron's that this rank made, and their experts."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    options = {"schedule": schedule, "random_init": False, "tokens": TOKENS}
    with instances_of(MoELayer) as made:
        report = train(folder, [*flags, *RUN], iterations=1, **options)
    return report, [mixture.num_local_experts for mixture in made]
