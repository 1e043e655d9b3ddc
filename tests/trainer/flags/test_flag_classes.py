"""What becomes of each of Megatron's flags: every one is in one class, and one that is in none is named."""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from megasched.errors import ConfigError
from megasched.trainer.flags.arguments import FLAGS, apply_derived, refuse_unsupported
from megasched.trainer.flags.flag_classes import CLASSES, explicit_flags, flag_class
from megasched.trainer.flags.honoured_flags import DERIVED, HONOURED
from megasched.trainer.flags.idle_flags import IDLE
from megasched.trainer.flags.moe import is_mixture_flag
from megasched.trainer.flags.refused_flags import REFUSED, REFUSED_VALUES
from megasched.trainer.flags.rehearsal import SWITCHES
from megasched.trainer.seams import registry
from tests.trainer.flags.models import config, derived_args, megatron_parser, refusal

# Of Megatron's main (core 0.20, commit d98e8a6), what 0.19.2 has not.
NEW_ON_MAIN = (
    "mtp_hsm moe_use_grouped_tensor gtp_remat_opt_in_modules moe_dispatch_fwd_dtype moe_combine_bwd_dtype "
    "enable_mhc_connections mhc_num_residual_streams mhc_sinkhorn_iterations mhc_init_gating_factor "
    "mhc_recompute_layer_num batch_invariant_backend gdp_num_householder gdp_cutedsl_kernel "
    "gdp_num_chunk_states_to_recompute muon_use_syrk rl_max_inflight_requests rl_durable_rollout_bank "
    "rl_rollout_bank_dir rl_rollout_bank_max_bytes ckpt_fully_parallel_load_per_rank_objects "
    "ckpt_pg_tensors_cache_path ckpt_pg_tensors_cache_create save_tokenizer_assets "
    "ckpt_drop_redundant_extra_state logit_dtype gtp_remat_reduce_scatter_with_fp32_accumulation "
    "megatron_fsdp_version gtp_remat_nccl_ub gtp_expert_remat_nccl_ub use_gigatoken otel_enabled "
    "otel_service_name otel_span_groups"
)
GONE_ON_MAIN = "moe_ncclep_static_shape stream_ckpt_dequant"
# Added by Megatron or its scripts where an optional package is installed.
OF_PACKAGES = ["kitchen_config_file", "kitchen_recipe_number", "modelopt_enabled"]


def megatrons() -> list[str]:
    """The `args` attributes of the installed Megatron's flags."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    return sorted({action.dest for action in parser._actions})


def of_the_wheel() -> set[str]:
    """Those of 0.19.2, whichever of the two is installed."""
    return (set(megatrons()) - set(NEW_ON_MAIN.split())) | set(GONE_ON_MAIN.split())


def test_main_differs_in_what_is_listed() -> None:
    wheel, main = of_the_wheel(), (of_the_wheel() - set(GONE_ON_MAIN.split())) | set(NEW_ON_MAIN.split())
    assert set(megatrons()) in (wheel, main)
    assert (len(wheel), len(main)) == (806, 837)


def test_every_flag_is_in_one_class() -> None:
    names = of_the_wheel() | set(NEW_ON_MAIN.split()) | set(OF_PACKAGES)
    classes = {name: [kind for kind, holds in CLASSES.items() if holds(name)] for name in names}
    assert {name: found for name, found in classes.items() if len(found) != 1} == {}
    assert set(CLASSES) == {flag_class(name) for name in names}


def test_the_tables_name_no_flag_that_megatron_has_not() -> None:
    names = of_the_wheel() | set(NEW_ON_MAIN.split())
    unknown = [name for name in (*HONOURED, *DERIVED, *IDLE) if name not in names]
    unknown += [pattern for pattern in REFUSED if not any(fnmatchcase(name, pattern) for name in names)]
    assert unknown == OF_PACKAGES
    assert {dest for dest, _ in REFUSED_VALUES} <= HONOURED.keys()


def test_values_that_are_refused_are_values_of_their_flags() -> None:
    choices = {action.dest: action.choices for action in megatron_parser()._actions if action.choices}
    for dest, value in REFUSED_VALUES:
        assert value in {getattr(choice, "name", choice) for choice in choices[dest]}, dest
    optimizers = {value for dest, value in REFUSED_VALUES if dest == "optimizer"}
    assert set(choices["optimizer"]) - optimizers == {"adam", "sgd"}


def test_the_counts_in_run_md() -> None:
    counts = Counter(flag_class(name) for name in of_the_wheel())
    text = (Path(__file__).parents[3] / "docs" / "run.md").read_text()
    assert {name: int(count) for name, count in re.findall(r"^\| (\w+) \| (\d+) \|", text, re.MULTILINE)} == counts


class Recorded(argparse.Namespace):
    """Arguments that know which of them were set again."""

    def __init__(self, args: argparse.Namespace) -> None:
        vars(self).update(vars(args))
        vars(self)["changed"] = set()

    def __setattr__(self, name: str, value: Any) -> None:
        self.changed.add(name)
        super().__setattr__(name, value)


def test_derived_flags_are_what_the_code_derives(hf_model: str, gpt2_model: str, tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    sizes = {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 6, "vocab_size": 300}
    sizes |= {"intermediate_size": 112, "max_position_embeddings": 64}
    config("llama", **sizes, rope_parameters=rope).save_pretrained(tmp_path / "llama3")
    changed = set[str]()
    for model in (hf_model, gpt2_model, str(tmp_path / "llama3")):
        argv = ("--hf-model", model, "--seq-length", "32")
        args = Recorded(megatron_parser().parse_args(argv))
        args.world_size = 1
        apply_derived(args, explicit_flags(megatron_parser(), argv))
        changed |= args.changed - {"world_size"}
    assert changed == DERIVED


# ---- a run ------------------------------------------------------------------------------------------


def notes(*argv: str) -> str:
    args = megatron_parser().parse_args(list(argv))
    args.world_size = 1
    return "\n".join(apply_derived(args, explicit_flags(megatron_parser(), argv)))


@pytest.mark.parametrize("name", ["muon", "dist_muon", "adaptive_muon", "soap", "lion"])
def test_other_optimizers_are_refused(hf_model: str, name: str) -> None:
    assert f"--optimizer {name}: " in refusal("--hf-model", hf_model, "--optimizer", name)
    derived_args("--hf-model", hf_model, "--optimizer", "sgd")


@pytest.mark.parametrize(
    ("flag", "why"),
    [
        ("--rampup-batch-size 2 2 100", "--step-batch-size-schedule does that"),
        ("--fp16-lm-cross-entropy", "the loss of each token is computed in float32"),
        ("--rl-use-sequence-packing", "reinforcement learning"),
        ("--batch-size 4", "say --micro-batch-size"),
        ("--num-classes 10", "it is for vision models of Megatron's own"),
        ("--ckpt-format fsdp_dtensor", "it is for FSDP"),
        ("--logits-load-dir x", "output layer of Megatron's own models"),
    ],
)
def test_what_would_train_otherwise_than_asked_is_refused(hf_model: str, flag: str, why: str) -> None:
    message = refusal("--hf-model", hf_model, *flag.split())
    assert f"{flag}: " in message
    assert why in message


def test_flags_that_change_nothing_are_said(hf_model: str, gpt2_model: str) -> None:
    said = notes("--hf-model", hf_model, "--use-flash-attn", "--muon-momentum", "0.8", "--train-iters", "3")
    assert said.splitlines() == [
        "flags that change nothing under a schedule:",
        "  - --use-flash-attn: Megatron reads it nowhere; say --attention-backend flash",
        "  - --muon-momentum 0.8: it says more of --optimizer muon and its like, which are refused",
    ]
    assert notes("--hf-model", hf_model, "--muon-momentum", "0.9", "--rotary-base", "10000") == ""
    assert "--rotary-base 500: the HF model has nothing" in notes("--hf-model", gpt2_model, "--rotary-base", "500")
    assert notes("--hf-model", hf_model, "--num-layers", "2", "--expert-tensor-parallel-size", "1") == ""


def test_a_rehearsal_adds_no_flag_that_is_refused() -> None:
    refuse_unsupported(SWITCHES)


@pytest.fixture
def new_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Megatron that has a flag of which nobody has heard."""
    from megatron.training import arguments

    add = arguments.add_megatron_arguments

    def added(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = add(parser)
        parser.add_argument("--warp-factor", type=int, default=1)
        return parser

    monkeypatch.setattr(arguments, "add_megatron_arguments", added)


UNKNOWN = r"--warp-factor 9: megasched does not know this flag of Megatron 0\.\d+\.\d+; --allow-unverified"


@pytest.mark.usefixtures("new_flag")
def test_a_flag_of_no_class_is_named(hf_model: str) -> None:
    asked = ("--hf-model", hf_model, "--warp-factor", "9")
    with pytest.raises(ConfigError, match=UNKNOWN):
        derived_args(*asked)
    with pytest.raises(ConfigError, match=UNKNOWN):
        refuse_unsupported(asked)
    assert notes("--hf-model", hf_model, "--warp-factor", "1") == ""
    said = notes(*asked, "--allow-unverified")
    assert said.startswith("warning: flags of Megatron 0.")
    assert said.endswith("that megasched does not know: --warp-factor 9")
    refuse_unsupported([*asked, "--allow-unverified"])


def test_megascheds_own_flags_have_no_class() -> None:
    own = [flag[2:].replace("-", "_") for flag in FLAGS]
    assert [name for name in own if flag_class(name)] == []
    assert all(flag_class(name) == "honoured" for name in megatrons() if is_mixture_flag(name))


@pytest.mark.usefixtures("new_flag")
def test_the_seam_says_it_once_and_leaves_a_scripts_flags_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], hf_model: str
) -> None:
    from megatron.training import arguments

    def of_script(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--of-the-script", type=int, default=0)
        return parser

    flags = "--hf-random-init --of-the-script 5 --seq-length 32 --micro-batch-size 2 --no-masked-softmax-fusion"
    argv = ["--model-schedule", "auto", "--hf-model", hf_model, *flags.split(), "--use-flash-attn"]
    assert registry.apply("arguments")
    try:
        for rehearsed, idle in ((["--rehearse"], 1), ([], 2)):
            monkeypatch.setattr(sys, "argv", ["pretrain.py", *argv, *rehearsed])
            arguments.parse_args(of_script)
            printed = capsys.readouterr().out
            assert printed.count("megasched: flags that change nothing under a schedule:\n") == 1
            assert printed.count("\n  - --") == idle
            assert "--of-the-script" not in printed
        monkeypatch.setattr(sys, "argv", ["pretrain.py", *argv, "--warp-factor", "9"])
        with pytest.raises(ConfigError, match=UNKNOWN):
            arguments.parse_args(of_script)
    finally:
        registry.undo("arguments")
