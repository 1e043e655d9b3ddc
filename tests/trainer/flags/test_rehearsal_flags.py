"""What a rehearsal makes of a command's flags."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from megasched.errors import ConfigError
from megasched.trainer.flags.rehearsal import DROPPED, SWITCHES, VALUES, rehearsal_flags, rehearsal_mode
from tests.trainer.flags.models import megatron_parser


def test_rehearsal_adds_what_is_missing_and_keeps_the_rest() -> None:
    argv = ["--bf16", "--num-workers", "2", "--data-path", "a", "b", "--adam-eps=-1", "--no-rope-fusion"]
    flags = rehearsal_flags(argv)
    assert flags.argv[: len(argv)] == argv
    assert flags.replaced == []
    assert flags.added == [
        "--distributed-backend gloo",
        "--transformer-impl local",
        "--rerun-mode disabled",
        "--use-cpu-initialization",
        "--no-gradient-accumulation-fusion",
        "--no-persist-layer-norm",
        "--no-masked-softmax-fusion",
        "--no-bias-swiglu-fusion",
        "--no-bias-gelu-fusion",
        "--no-bias-dropout-fusion",
    ]
    parsed, unknown = megatron_parser().parse_known_args(flags.argv)
    assert unknown == []
    assert (parsed.distributed_backend, parsed.bf16, parsed.num_workers) == ("gloo", True, 2)


def test_rehearsal_replaces_what_needs_a_gpu() -> None:
    argv = (
        "--distributed-backend=nccl --transformer-impl transformer_engine --fp8-format hybrid "
        "--tp-comm-overlap --cuda-graph-modules attn mlp --attention-backend flash "
        "--rerun-mode disabled --lr 1e-3"
    )
    flags = rehearsal_flags(argv.split())
    kept = "--distributed-backend gloo --transformer-impl local --rerun-mode disabled --lr 1e-3"
    assert " ".join(flags.argv).startswith(kept + " --num-workers 0 --use-cpu-initialization")
    shown = [str(one) for one in flags.replaced]
    assert shown[0] == "--distributed-backend=nccl -> --distributed-backend gloo (NCCL needs GPUs)"
    assert shown[2] == "--fp8-format hybrid -> left out (8-bit kernels need a GPU)"
    assert [one.given for one in flags.replaced[3:]] == [
        "--tp-comm-overlap",
        "--cuda-graph-modules attn mlp",
        "--attention-backend flash",
    ]
    assert "stays as it will run on the cluster" in str(flags)


def test_activations_of_grouped_experts_are_recomputed_with_their_mixture() -> None:
    modules = ["--recompute-modules", "moe_act", "core_attn"]
    flags = rehearsal_flags(["--moe-grouped-gemm", *modules, "moe"])
    assert flags.argv[:3] == ["--recompute-modules", "moe", "core_attn"]
    assert [str(one) for one in flags.replaced] == [
        "--moe-grouped-gemm -> left out (it is a GPU kernel)",
        "--recompute-modules moe_act core_attn moe -> --recompute-modules moe core_attn (moe_act needs "
        "--moe-grouped-gemm)",
    ]
    assert rehearsal_flags(modules).argv[:3] == modules  # which Megatron refuses, here and on the cluster


def test_a_rehearsal_saves_in_the_background_without_nvidias_package() -> None:
    saving = ["--async-save", "--use-persistent-ckpt-worker"]
    flags = rehearsal_flags(saving)
    assert flags.argv[:2] == saving
    assert flags.replaced == []
    assert "--async-strategy mcore" in flags.added
    assert "--async-strategy mcore" not in rehearsal_flags(["--use-persistent-ckpt-worker"]).added
    assert [one.by for one in rehearsal_flags([*saving, "--async-strategy", "nvrx"]).replaced] == [
        "--async-strategy mcore"
    ]


def test_rehearsal_of_a_rehearsal_changes_nothing() -> None:
    once = rehearsal_flags(["--lr", "1e-3", "--fp8-format", "hybrid"])
    twice = rehearsal_flags(once.argv)
    assert (twice.argv, twice.added, twice.replaced) == (once.argv, [], [])


def test_every_flag_of_the_rehearsal_is_one_of_megatrons() -> None:
    options = set(megatron_parser()._option_string_actions)
    patterns = [*DROPPED, *VALUES, *SWITCHES]
    assert [p for p in patterns if not any(fnmatchcase(option, p) for option in options)] == []


@pytest.mark.parametrize(
    ("argv", "environ", "mode"),
    [
        ([], {}, ""),
        (["--rehearse"], {}, "1"),
        ([], {"MEGASCHED_REHEARSE": "1"}, "1"),
        (["--rehearse"], {"MEGASCHED_REHEARSE": "force"}, "force"),
        ([], {"MEGASCHED_REHEARSE": "0"}, ""),
        ([], {"MEGASCHED_REHEARSE": ""}, ""),
        (["--rehearse"], {"MEGASCHED_REHEARSE": "0"}, "1"),
    ],
)
def test_when_a_rehearsal_is_asked_for(argv: list[str], environ: dict[str, str], mode: str) -> None:
    assert rehearsal_mode(argv, environ) == mode


def test_other_values_of_the_variable_are_refused() -> None:
    with pytest.raises(ConfigError, match="MEGASCHED_REHEARSE=yes"):
        rehearsal_mode([], {"MEGASCHED_REHEARSE": "yes"})
