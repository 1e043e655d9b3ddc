"""HF weights through Megatron's trainer and its checkpoints, out again into plain transformers."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megasched.errors import ConfigError
from megasched.verify.ranks.pool import RankError
from megasched.verify.trainer_run import losses, train
from megasched.weights.exporting import export_weights
from megasched.weights.importing import import_weights
from megasched.weights.inspection import inspect_checkpoint
from tests import tiny
from tests.parity.cases import slow
from tests.weights.conftest import tiny_config
from tests.weights.test_round_trip import assert_same_bits

CHECKPOINT = ["--use-distributed-optimizer", "--ckpt-format", "torch_dist"]
STILL = ["--lr", "0", "--min-lr", "0", "--weight-decay", "0"]
ONE = (1, "")
TP2_PP2 = (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2")
PP2_EP2 = (4, "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2")


def quiet(total):
    return nullcontext(lambda count: None)


def export(load, output, **options):
    return export_weights(load, output, progress=quiet, max_shard_size=10**9, **options)


@pytest.fixture
def folder(tmp_path):
    """The function that saves a model of a family, all of its parameters at random, as an HF folder."""

    def save(family):
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(tiny_config(family, vocab_size=99))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.1)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.copy_(torch.randn_like(buffer))
        model.save_pretrained(tmp_path / family)
        return tmp_path / family

    return save


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen2", ONE),
        ("phi3", TP2_PP2),
        slow("deepseek_v3", PP2_EP2),
        slow("gpt2", TP2_PP2),
        slow("mixtral", PP2_EP2),
    ],
)
def test_weights_come_out_as_they_went_in(ranks, folder, tmp_path, family, layout):
    """After a step of length zero; the folder, the checkpoint and what is imported of the folder are the same."""
    (world, flags), given = layout, folder(family)
    import_weights(given, tmp_path / "imported", progress=quiet)
    flags = [*flags.split(), *CHECKPOINT, *STILL, "--save-interval", "1"]
    from_folder = ranks.run(
        *(world, train, str(given), [*flags, "--save", str(tmp_path / "a")]), iterations=1, random_init=False
    )
    kept = str(tmp_path / "imported" / "release" / "hf_model")  # config alone: the weights are in the checkpoint
    where = "--pretrained-checkpoint" if layout is ONE else "--load"
    loading = [where, str(tmp_path / "imported"), "--save", str(tmp_path / "b")]
    from_import = ranks.run(world, train, kept, [*flags, *loading], iterations=1, random_init=False)
    assert losses(from_import) == losses(from_folder)
    for name in "ab":
        exported = export(tmp_path / name, tmp_path / f"hf_{name}")
        assert_same_bits(given, tmp_path / f"hf_{name}")
        assert exported.iteration == 1


def test_a_stage_without_experts_resumes(ranks, folder, tmp_path):
    """DeepSeek's first layer is dense, so the first stage has nothing for the optimizer of the experts."""
    given, (world, flags) = str(folder("deepseek_v3")), PP2_EP2
    flags = [*flags.split(), *CHECKPOINT, "--dist-ckpt-optim-fully-reshardable", "--override-opt-param-scheduler"]
    whole = ranks.run(world, train, given, flags, iterations=4, random_init=False)
    saving = [*flags, "--save", str(tmp_path / "ckpt"), "--save-interval", "2"]
    ranks.run(world, train, given, saving, iterations=2, random_init=False)
    loading = [*flags, "--load", str(tmp_path / "ckpt")]
    resumed = ranks.run(world, train, given, loading, iterations=4, random_init=False)
    torch.testing.assert_close(losses(resumed), losses(whole)[2:], rtol=2e-6, atol=0)
    torch.testing.assert_close(resumed[0].grad_norms, whole[0].grad_norms[2:], rtol=1e-5, atol=0)


WRAPPED = """
from megasched.model_adapters.default_schedule import schedule as auto
from tests.language.replacing import Around


def schedule(sch, layout):
    auto(sch, layout)
    sch["model.layers.*.mlp"].replace(Around)
    sch["model.layers.1"].replace(Around)
    sch["lm_head"].replace(Around)
"""


def test_what_is_inside_of_new_modules_has_the_names_of_hf(ranks, folder, tmp_path):
    """Parameters, and corrections of routers, which are buffers: filled from the folder, saved and exported."""
    given, file = folder("deepseek_v3"), tmp_path / "wrapped.py"
    file.write_text(WRAPPED)
    flags = [*CHECKPOINT, *STILL, "--pipeline-model-parallel-size", "2", "--save-interval", "1"]
    plain, wrapped = (
        ranks.run(
            *(2, train, str(given), [*flags, "--save", str(tmp_path / name)]),
            iterations=1,
            random_init=False,
            schedule=schedule,
        )
        for name, schedule in {"plain": "auto", "wrapped": str(file)}.items()
    )
    assert losses(wrapped) == losses(plain)
    export(tmp_path / "wrapped", tmp_path / "exported")
    assert_same_bits(given, tmp_path / "exported")


def assert_computes(model, reports):
    """Plain transformers gives the logits of the first iteration of a run."""
    batches = [tokens for _, tokens, _ in next(r.batches for r in reports if r.batches and r.pp_rank == 0)]
    last = [report.logits[0] for report in reports if report.logits]
    assert last
    for logits in last:
        assert len(logits) == len(batches)
        for tokens, found in zip(batches, logits, strict=True):
            with torch.no_grad():
                expected = model.eval()(input_ids=tokens).logits
            torch.testing.assert_close(found[..., : expected.shape[-1]], expected, rtol=1e-5, atol=1e-5)


def test_the_exported_model_computes_what_the_scheduled_one_does(ranks, tmp_path):
    """Three steps, export, and the fourth step's logits in plain transformers."""
    config = tiny.save("qwen3", tmp_path / "config")
    world, flags = TP2_PP2
    flags = [*flags.split(), *CHECKPOINT, "--dist-ckpt-optim-fully-reshardable", "--override-opt-param-scheduler"]
    saving = ["--save", str(tmp_path / "ckpt"), "--save-interval", "3"]
    ranks.run(world, train, config, [*flags, *saving], iterations=3)
    export(tmp_path / "ckpt", tmp_path / "hf")
    resumed = ranks.run(world, train, config, [*flags, "--load", str(tmp_path / "ckpt")], iterations=4)
    assert_computes(AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), resumed)
    found = inspect_checkpoint(tmp_path / "ckpt")
    assert (found.iteration, found.layout["TP"], found.layout["PP"]) == (3, 2, 2)
    assert set(found.optimizer) == {"param", "exp_avg", "exp_avg_sq"}
    assert found.optimizer["exp_avg"] == found.bytes


def test_a_run_resumes_where_the_hf_weights_are_gone(ranks, folder, tmp_path):
    given = folder("llama")
    flags = [
        *CHECKPOINT,
        "--override-opt-param-scheduler",
        "--save-interval",
        "2",
        "--save",
        str(tmp_path / "ckpt"),
    ]
    whole = ranks.run(1, train, str(given), CHECKPOINT, iterations=4, random_init=False)
    ranks.run(1, train, str(given), flags, iterations=2, random_init=False)
    for path in Path(given).glob("*.safetensors"):
        path.unlink()
    loading = [*flags, "--load", str(tmp_path / "ckpt")]
    resumed = ranks.run(1, train, str(given), loading, iterations=4, random_init=False)
    torch.testing.assert_close(losses(resumed), losses(whole)[2:], rtol=2e-6, atol=0)
    with pytest.raises(RankError, match="no safetensors weights there"):
        ranks.run(1, train, str(given), [*flags[:-1], str(tmp_path / "other")], iterations=1, random_init=False)


LORA = """
from megasched.model_adapters.default_schedule import schedule as auto

def schedule(sch, layout):
    auto(sch, layout)
    sch["**.[qv]_proj"].adapt(rank=4, alpha=8)
    sch["**.down_proj"].adapt(rank=2)
    sch["lm_head"].unfreeze()
"""


def test_lora_comes_out_merged_or_as_an_adapter(ranks, folder, tmp_path):
    from peft import PeftModel

    given, (world, flags) = folder("llama"), TP2_PP2
    (tmp_path / "mylora.py").write_text(LORA)
    flags = [*flags.split(), *CHECKPOINT, "--dist-ckpt-optim-fully-reshardable", "--override-opt-param-scheduler"]
    saving = [*flags, "--save", str(tmp_path / "ckpt"), "--save-interval", "3"]
    run = {"schedule": str(tmp_path / "mylora.py"), "random_init": False}
    ranks.run(world, train, str(given), saving, iterations=3, **run)
    resumed = ranks.run(world, train, str(given), [*flags, "--load", str(tmp_path / "ckpt")], iterations=4, **run)
    export(tmp_path / "ckpt", tmp_path / "merged")
    assert_computes(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), resumed)
    exported = export(tmp_path / "ckpt", tmp_path / "adapter", adapter=True)
    assert (exported.adapter, exported.tensors) == (True, 2 * (2 + 2 + 2) + 1)
    base = AutoModelForCausalLM.from_pretrained(given)
    assert_computes(PeftModel.from_pretrained(base, tmp_path / "adapter"), resumed)
    import_weights(given, tmp_path / "imported", progress=quiet)
    begun = ranks.run(
        world, train, str(given), [*flags, "--load", str(tmp_path / "imported")], iterations=3, **run
    )
    expected = ranks.run(world, train, str(given), flags, iterations=3, **run)
    assert losses(begun) == losses(expected)
    assert begun[0].grad_norms == expected[0].grad_norms
    with pytest.raises(ConfigError, match="no LoRA adapters in it"):
        export(tmp_path / "imported", tmp_path / "none", adapter=True)
