"""What transformers holds in float32 in a model of half precision stays so, from files to files; nothing else."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megasched.definition.small_models.small_models import small_config
from megasched.verify.trainer_run import losses, train
from megasched.weights.exporting import export_weights
from tests.parity.cases import slow

GIGABYTE = 10**9
TP2 = ["--bf16", "--tensor-model-parallel-size", "2", "--ckpt-format", "torch_dist"]
# Of routers: the weight and the correction, a parameter, in one; the correction alone, a buffer, in another; both,
# in routers that are Megatron's under sequence parallelism.
KEPT = {
    "ernie4_5_moe": ("mlp.gate.weight", "mlp.moe_statics.e_score_correction_bias"),
    "kolibri1": ("moe.router.expert_bias",),
    "glm4_moe": ("mlp.gate.weight", "mlp.gate.e_score_correction_bias"),
}


@pytest.mark.parametrize(
    ("model_type", "sp"),
    [("ernie4_5_moe", False), ("kolibri1", False), ("glm4_moe", True), slow("glm4_moe", False)],
)
def test_a_run_in_bf16_writes_what_transformers_would(ranks, tmp_path, model_type, sp):
    folder = _write(model_type, tmp_path / "hf")
    flags = [
        *TP2,
        *(["--sequence-parallel"] if sp else []),
        "--save",
        str(tmp_path / "ckpt"),
        "--save-interval",
        "1",
        "--lr",
        "0",
        "--min-lr",
        "0",
    ]
    ranks.run(2, train, folder, flags, iterations=1, random_init=False)
    export_weights(
        tmp_path / "ckpt",
        tmp_path / "exported",
        max_shard_size=GIGABYTE,
        progress=lambda total: nullcontext(lambda count: None),
    )
    found = load_file(tmp_path / "exported" / "model.safetensors")

    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(tmp_path / "theirs")
    wanted = load_file(tmp_path / "theirs" / "model.safetensors")
    kept = {name for name, value in wanted.items() if value.dtype == torch.float32}
    assert {name.partition("layers.")[2].partition(".")[2] for name in kept} == set(KEPT[model_type])
    assert any(not torch.equal(wanted[name], wanted[name].bfloat16().float()) for name in kept)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


# What is no part of the state, and has the dtype of the model all the same: GPT's mask, positions, scales.
@pytest.mark.parametrize("model_type", ["openai-gpt", "xglm", "minimax", slow("gemma3_text"), slow("falcon_h1")])
def test_buffers_of_a_run_in_bf16_are_those_of_transformers(ranks, tmp_path, model_type):
    folder = _write(model_type, tmp_path / "hf")
    ((found, loss),) = ranks.run(1, _buffers_and_loss, folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    wanted = {name: buffer for name, buffer in theirs.named_buffers() if buffer.is_floating_point()}
    assert {buffer.dtype for buffer in wanted.values()} >= {torch.bfloat16}
    assert found.keys() == wanted.keys()
    for name, buffer in wanted.items():
        assert (found[name].dtype, found[name].shape) == (buffer.dtype, buffer.shape), name
        assert torch.equal(found[name], buffer), name
    flags = ["--bf16", "--pipeline-model-parallel-size", "2"]
    staged = ranks.run(2, train, folder, flags, iterations=1, random_init=False)
    assert losses(staged)[0] == pytest.approx(loss, rel=5e-3)


def _buffers_and_loss(folder):
    """What Megatron's wrapper leaves of them, and the first loss."""
    from megatron.core.transformer.module import Float16Module

    found, wrap = {}, Float16Module.__init__

    def watched(wrapper, config, module):
        wrap(wrapper, config, module)
        held = module.definition.named_buffers()
        found.update((name, buffer.clone()) for name, buffer in held if buffer.is_floating_point())

    with mock.patch.object(Float16Module, "__init__", watched):
        report = train(folder, ["--bf16"], iterations=1, random_init=False)
    return found, losses([report])[0]


def _write(model_type, folder):
    """As transformers writes it; with corrections that bf16 does not have, where a new model has zeros."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(small_config(model_type), dtype=torch.float32)
    for name, value in model.state_dict(keep_vars=True).items():
        if name.endswith(("correction_bias", "expert_bias")):
            value.data += torch.linspace(0.1, 0.3, value.numel()).view_as(value)
        elif isinstance(value, torch.nn.Parameter):
            value.data += 0.05 * torch.randn(value.shape)
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "flags", [["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"], slow([])]
)
def test_their_optimizer_state_is_resumed(ranks, tmp_path, flags):
    folder = _write("ernie4_5_moe", tmp_path / "hf")
    flags = [*TP2, *flags, "--override-opt-param-scheduler"]
    whole = ranks.run(4, train, folder, flags, iterations=4, random_init=False)
    saving = [*flags, "--save", str(tmp_path / "ckpt"), "--save-interval", "2"]
    ranks.run(4, train, folder, saving, iterations=2, random_init=False)
    loading = [*flags, "--load", str(tmp_path / "ckpt")]
    resumed = ranks.run(4, train, folder, loading, iterations=4, random_init=False)
    assert losses(resumed) == losses(whole)[2:]
    assert resumed[0].grad_norms == whole[0].grad_norms[2:]
    for again, before in zip(resumed, whole, strict=True):
        assert again.weights.keys() == before.weights.keys()
        kept = {name for name, shard in again.weights.items() if shard[0].dtype == torch.float32}
        assert {name.partition("mlp.")[2] for name in kept} == {
            "gate.weight",
            "gate.moe_statics.e_score_correction_bias",
        }
        for name, shard in again.weights.items():
            assert torch.equal(shard[0], before.weights[name][0]), name
