"""The same runs under a Megatron-LM checkout and the installed megatron-core: the same numbers, bit by bit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megasched.patches import registry
from megasched.trainer import seams
from megasched.verify.trainer_run import RUN_FLAGS, gather, losses, train
from tests import tiny
from tests.families.example import MAKE
from tests.parity.steps import assert_first_step_equals_hf, assert_same_losses

pytestmark = pytest.mark.checkout

FAMILIES = ("llama", "qwen3", "gemma2", "phi3", "gpt2", "mixtral")
TP2, PP2 = ("--tensor-model-parallel-size", "2"), ("--pipeline-model-parallel-size", "2")
LAYOUTS = {  # name -> ranks, TP, flags
    "one-rank": (1, 1, ()),
    "tp2-sp-pp2-vpp2": (4, 2, (*TP2, "--sequence-parallel", *PP2, "--num-virtual-stages-per-pipeline-rank", "2")),
    "dp2-tp2-overlap": (
        4,
        2,
        (*TP2, "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    ),
    "pp2-bf16": (2, 1, (*PP2, "--bf16")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_three_steps_are_those_of_the_wheel_and_of_hf(ranks, ranks_of_checkout, tmp_path, family, layout):
    folder = tiny.save(family, tmp_path)
    world, tp, flags = LAYOUTS[layout]
    wheel, other = (
        each.run(world, train, folder, list(flags), iterations=3) for each in (ranks, ranks_of_checkout)
    )
    assert losses(other) == losses(wheel)
    assert [report.grad_norms for report in other] == [report.grad_norms for report in wheel]
    wanted, found = (gather(reports, "weights", tp) for reports in (wheel, other))
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    if layout == "dp2-tp2-overlap":  # a rank has its part of the summed gradients alone
        assert_same_losses(other, ranks.run(1, train, folder, [], iterations=3))
    elif "--bf16" not in flags:
        assert_first_step_equals_hf(ranks, folder, other, tp, random_init=True)


SAVE = ("--use-distributed-optimizer", "--ckpt-format", "torch_dist", "--dist-ckpt-optim-fully-reshardable")
STOP, END = 2, 4


@pytest.mark.parametrize("written_by", ["wheel", "checkout"])
def test_checkpoints_go_both_ways_at_another_layout(ranks, ranks_of_checkout, tmp_path, written_by):
    one, other = (ranks, ranks_of_checkout) if written_by == "wheel" else (ranks_of_checkout, ranks)
    folder = tiny.save("phi3", tmp_path / "model")
    flags = [*SAVE, "--override-opt-param-scheduler"]
    whole = one.run(4, train, folder, [*TP2, *PP2, *flags], iterations=END)
    saving = [*TP2, *PP2, *flags, "--save", str(tmp_path / "ckpt"), "--save-interval", str(STOP)]
    one.run(4, train, folder, saving, iterations=STOP)
    resumed = other.run(2, train, folder, [*TP2, *flags, "--load", str(tmp_path / "ckpt")], iterations=END)
    torch.testing.assert_close(losses(resumed), losses(whole)[STOP:], rtol=2e-6, atol=0)
    expected, found = gather(whole, "weights", 2), gather(resumed, "weights", 2)
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-5, atol=1e-6, msg=name)


def test_a_tokenizer_that_megatron_writes_into_a_checkpoint_hides_nothing_of_it(
    ranks, ranks_of_checkout, tmp_path
):
    """Main writes it when the checkpoint has its name and the tracker its number: a kill between loses nothing."""
    size = MAKE["write_tokenizer"](tmp_path / "model", MAKE["OF_BERT"])
    folder = tiny.save("llama", tmp_path / "model", vocab_size=max(size, 90))
    flags = [*SAVE, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder]
    flags += ["--override-opt-param-scheduler"]
    saving = [*flags, "--save", str(tmp_path / "ckpt"), "--save-interval", str(STOP)]
    written = ranks_of_checkout.run(1, train, folder, saving, iterations=STOP)
    checkpoint = tmp_path / "ckpt" / f"iter_{STOP:07d}"
    assert (checkpoint / "tokenizer" / "tokenizer.json").is_file()
    assert sorted(path.name for path in (tmp_path / "ckpt").iterdir() if path.is_dir()) == [checkpoint.name]
    shutil.rmtree(checkpoint / "tokenizer")  # as a kill leaves it
    loading = [*flags, "--load", str(tmp_path / "ckpt")]
    whole = ranks.run(1, train, folder, flags, iterations=END)
    for each in (ranks, ranks_of_checkout):
        assert losses(each.run(1, train, folder, loading, iterations=END)) == losses(whole)[STOP:]
    assert losses(written) == losses(whole)[:STOP]


def printed(script, hf_model, cache, environment):
    """Iteration lines of one rank, from its loss on: what `torchrun -m megasched SCRIPT` prints."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m"]
    flags = [*RUN_FLAGS, "--train-iters", "3", "--model-schedule", "auto", "--hf-model", hf_model]
    flags += ["--hf-random-init", "--rehearse", "--data-cache-path", str(cache)]
    done = subprocess.run(
        [*launcher, "megasched", str(script), *flags], capture_output=True, text=True, env=environment, cwd=cache
    )
    found = re.findall(r"iteration +\d+/.*?(lm loss: \S+).*?(grad norm: \S+)", done.stdout)
    assert len(found) == 3, done.stdout[-3000:] + done.stderr[-3000:]
    return found


def test_both_scripts_run_unmodified_by_one_command(checkout, tmp_path):
    folder = tiny.save("llama", tmp_path / "model")
    # Whatever python3 is first on PATH, the helpers of datasets are compiled by the one that runs.
    environment = {**os.environ, "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    scripts = ("pretrain_gpt.py", checkout / "pretrain_gpt.py", checkout / "pretrain_hybrid.py")
    bundled, gpt, hybrid = (printed(script, folder, tmp_path, environment) for script in scripts)
    assert gpt == bundled
    assert hybrid == bundled


def checked():
    """Where this Megatron is, and what it does without, by patch; a target that moved is an error here."""
    import megatron.core

    others = [patch for patch in seams.available() if patch.name not in registry.active()]
    return megatron.core.__file__, {patch.name: registry.check(patch) for patch in others}


def test_every_patch_fits(checkout, ranks_of_checkout):
    ((file, found),) = ranks_of_checkout.run(1, checked)
    assert Path(file).parents[2] == checkout
    features = {name for name in found if name in ("arguments", "model_flops", "one_writer", "model_builder")}
    assert {found[name] for name in features} == {None}
