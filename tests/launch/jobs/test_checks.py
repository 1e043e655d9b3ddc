"""A job looked over before it is submitted: what it is, and why it would fail.

Each look is a process that imports Megatron, so that no more are taken than there are ways through it.
"""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path

import pytest

from megasched.cli.main import main
from megasched.errors import ConfigError
from megasched.launch.jobs import checks
from megasched.launch.jobs.checks import check, check_waived
from megasched.planner.hardware.hardware import load_hardware
from megasched.verify.trainer_run import train
from tests import tiny

WORDS = """--model-schedule auto --hf-random-init --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
--seq-length 16 --micro-batch-size 2 --global-batch-size 128 --train-iters 10 --lr 1e-3 --mock-data --bf16
--tokenizer-type NullTokenizer --vocab-size 99 --make-vocab-size-divisible-by 4 --eval-iters 0 --save-interval 5
--use-distributed-optimizer --ckpt-format torch_dist --allow-unverified"""
FLAGS = WORDS.split()
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"

# A user's own script: a flag of its own, and what it does before it trains.
SCRIPT = """
import os
from megatron.training import pretrain
from megatron.training.arguments import parse_and_validate_args
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args

def flags(parser):
    parser.add_argument("--mine", required=True)
    return parser

args = parse_and_validate_args(extra_args_provider=flags, args_defaults={"tokenizer_type": "NullTokenizer"})
print("own script, mine is", args.mine)
if args.mine != "nothing":
    print("with", os.environ["MINE"])
    pretrain(pretrain_cfg_container_from_args(args, gpt_config_from_args(args)), None, None, None)
"""


@pytest.fixture
def flags(tmp_path):
    return [*FLAGS, "--hf-model", tiny.save("llama", tmp_path / "model"), "--save", str(tmp_path / "ckpt")]


def test_a_job_that_can_run_where_its_gpus_are_large_enough(flags, tmp_path, monkeypatch):
    run = checks._run("pretrain_gpt.py", flags, 64, {})
    monkeypatch.setattr(checks, "_run", lambda *given: copy.deepcopy(run))
    found = check("pretrain_gpt.py", flags, 64, "h100-80gb")
    assert (found.problems, found.warnings) == ((), ())
    facts = found.facts
    numbers = tiny_parameters()
    assert facts["parameters"] == numbers
    assert facts["layout"] == "TP2 x PP2 x DP16"
    assert facts["microbatches"] == 4
    assert facts["checkpoint_bytes"] == numbers * (2 + 12)
    assert facts["train_iters"] == 10
    assert len(facts["memory"]) == 2
    # At least bf16 weights and float32 gradients of a half of the model on a half of the ranks.
    assert min(facts["memory"]) > numbers / 4 * 6
    assert not (tmp_path / "ckpt").exists()

    folder = Path(load_hardware.__code__.co_filename).parent / "gpus"
    text = (folder / "h100-80gb.toml").read_text()
    small = text.replace("memory_gib = 79.1", "memory_gib = 4.00001")
    assert small != text
    (tmp_path / "small.toml").write_text(small)
    limit = load_hardware(str(tmp_path / "small.toml"))
    (problem,) = check("pretrain_gpt.py", flags, 64, str(tmp_path / "small.toml")).problems
    assert "pipeline rank " in problem
    assert f"{limit.memory_gib - limit.reserved_gib:.1f} GiB of a {limit.name} fit one" in problem


def tiny_parameters():
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny.config("llama"))
    return sum(parameter.numel() for parameter in model.parameters())


def test_everything_that_is_wrong_is_said(flags, tmp_path):
    (tmp_path / "file").write_text("")
    flags = [flag for flag in flags if flag != "--mock-data"]
    flags += ["--save", str(tmp_path / "file" / "ckpt"), "--data-path", "0.3", "a", "0.7", "b"]
    flags += ["--num-virtual-stages-per-pipeline-rank", "2", "--global-batch-size", "96"]
    flags += ["--lr-warmup-iters", "10"]
    problems = check("pretrain_gpt.py", flags, 64).problems
    assert [problem.split(":")[0] for problem in problems] == [
        "--global-batch-size 96 gives each pipeline 3 micro-batches; interleaved ones (VPP 2) go in groups of 2",
        "Megatron refuses the learning rate's schedule, of --lr 0.001 --train-iters 10 "
        "--lr-decay-iters 10 --lr-warmup-iters 10",
        "no data at a",
        "no data at b",
        f"--save {tmp_path}/file/ckpt",
    ]
    assert problems[0].endswith("128 would be right")
    assert problems[1].endswith("assert self.lr_warmup_steps < self.lr_decay_steps")
    assert problems[-1].endswith("can't be written to")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--no-such-flag"], "--no-such-flag: there is no such flag"),
        (
            ["--num-virtual-stages-per-pipeline-rank", "2", GROUP, "1"],
            f"{GROUP} 1: Megatron takes PP at least, 2",
        ),
        (["--tensor-model-parallel-size", "3"], "64 ranks are no multiple of TP 3 x PP 2 x CP 1"),
        pytest.param(["--min-lr", "1"], "min_lr", marks=pytest.mark.slow),
    ],
)
def test_the_first_that_megatron_says(flags, more, said):
    (problem,) = check("pretrain_gpt.py", [*flags, *more], 64).problems
    assert said in problem


def test_a_checkpoint_that_the_run_would_refuse(ranks, flags):
    """It is found before a queue has let the job through."""
    folder, save = (flags[flags.index(flag) + 1] for flag in ("--hf-model", "--save"))
    written = [
        "--use-distributed-optimizer",
        "--ckpt-format",
        "torch_dist",
        "--save",
        save,
        "--save-interval",
        "1",
    ]
    ranks.run(1, train, folder, written, iterations=1)
    resumed = [*flags, "--load", save]
    (said,) = check("pretrain_gpt.py", resumed, 64).problems
    assert "written at TP 1 x PP 1, loaded at TP 2 x PP 2" in said
    assert "--no-load-optim" in said
    assert check("pretrain_gpt.py", [*resumed, "--no-load-optim"], 64).problems == ()


def test_what_may_go_wrong_later(flags):
    at = flags.index("--save")
    found = check("pretrain_gpt.py", [*flags[:at], *flags[at + 2 :], "--log-straggler"], 64)
    assert found.problems == ()
    *of_gpus, last = found.warnings
    assert [one.endswith("pip install nvidia-ml-py") for one in of_gpus] == (
        [True] if find_spec("pynvml") is None else []
    )
    assert "there is no --save" in last


def test_larger_groups_of_micro_batches_hold_more_in_flight(flags):
    """Megatron takes 5 of them in a row, which are no multiple of PP."""
    chunks, large = ["--num-virtual-stages-per-pipeline-rank", "2", "--global-batch-size"], ["160", GROUP, "5"]
    found, by_default = (check("pretrain_gpt.py", [*flags, *chunks, *more], 64) for more in (large, ["192"]))
    assert found.problems == by_default.problems == ()
    assert found.facts["memory"][0] > by_default.facts["memory"][0]


def test_memory_of_another_optimizer_is_not_known(flags):
    more = ["--optimizer", "sgd", "--num-distributed-optimizer-instances", "2"]
    found = check("pretrain_gpt.py", [*flags, *more], 64, "h100-80gb")
    assert found.problems == ()
    assert found.warnings == (
        "memory is not known: only the states of Adam in float32 are counted, and there is --optimizer sgd, "
        "--num-distributed-optimizer-instances",
    )


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(SCRIPT)
    return str(path)


def test_a_script_of_the_users_own(flags, script):
    """It is begun with the variables of its ranks."""
    assert check(script, [*flags, "--mine", "x"], 64).problems[0].startswith("KeyError: 'MINE'")
    found = check(script, [*flags, "--mine", "x"], 64, environment={"MINE": "1"})
    assert found.facts["layout"] == "TP2 x PP2 x DP16"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--mine", "nothing"], "has come to its end without a call of Megatron's pretrain"),
        pytest.param([], "the following arguments are required: --mine", marks=pytest.mark.slow),
    ],
)
def test_why_a_script_of_the_users_own_would_fail(flags, script, more, said):
    (problem,) = check(script, [*flags, *more], 64).problems
    assert said in problem


def test_an_unknown_gpu_is_refused_at_once():
    with pytest.raises(ConfigError, match="h100-80gb"):
        check("pretrain_gpt.py", [], 64, "h1000")


# ---- what is waived ---------------------------------------------------------------------------------


@pytest.fixture
def begun(monkeypatch, tmp_path):
    """A run that was begun: it needs more memory than there is, and its checkpoints more disk."""
    facts = {"memory": [2**60], "save": str(tmp_path), "checkpoint_bytes": 2**60}
    found = {"problems": ["it stumbled"], "warnings": [], **facts}
    monkeypatch.setattr(checks, "_run", lambda *given: copy.deepcopy(found))


def test_a_check_that_is_waived_by_its_name_only_warns(begun):
    def looked_at(*waived):
        return check("pretrain_gpt.py", (), 2, "h100-80gb", waived)

    said = {"run": "it stumbled", "memory": "pipeline rank 0 needs", "disk": "--save "}
    assert [one.startswith(words) for one, words in zip(looked_at().problems, said.values(), strict=True)] == [
        True
    ] * 3
    for name, words in said.items():
        found = looked_at(name)
        assert [one.startswith(words) for one in found.warnings] == [True]
        assert len(found.problems) == 2
    assert looked_at(*said).problems == ()


def test_a_dry_run_only_warns_of_the_disk_of_the_machine_that_it_runs_on(begun, capsys):
    words = ["--nodes", "1", "--dry-run", "--", "pretrain_gpt.py"]
    with pytest.raises(SystemExit):
        main(["launch", "slurm", *words])
    assert capsys.readouterr().err.endswith("not submitted:\n  - it stumbled\n")


def test_a_check_that_there_is_not(capsys):
    with pytest.raises(
        ConfigError, match=r"--waive disc: there is no such check; did you mean disk\? There are run: "
    ):
        check_waived(["disc"])
    check_waived(["disk", "cluster", "memory", "run"])
