"""A run that is interrupted and resumed, at the same layout or another, goes on as if it had not been."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megasched.definition.small_models.small_models import write_small_model
from megasched.verify.ranks.pool import RankError
from megasched.verify.trainer_run import losses, train
from tests import tiny
from tests.parity.cases import slow
from tests.parity.mixtures import small_model
from tests.parity.steps import assert_same_run

DISTRIBUTED = "--use-distributed-optimizer"
SAVE = [DISTRIBUTED, "--ckpt-format", "torch_dist"]
SAVE += ["--dist-ckpt-optim-fully-reshardable", "--override-opt-param-scheduler"]
STOP, END = 2, 4

LAYOUTS = {
    "one-rank": (1, 1, ""),
    "tp4": (4, 4, "--tensor-model-parallel-size 4"),
    "pp4": (4, 1, "--pipeline-model-parallel-size 4"),
    "dp2-tp2-sp": (4, 2, "--tensor-model-parallel-size 2 --sequence-parallel"),
}


@pytest.mark.parametrize("family", ["phi3", slow("llama"), slow("gpt2"), slow("qwen3")])
def test_resume_at_every_layout(ranks, tmp_path, family):
    """Written at TP2 x PP2 x VPP2; packed, transposed and tied parameters and their optimizer states reshard,
    and a head of k and v that two ranks share."""
    folder = tiny.save(family, tmp_path / "model")
    written = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    written += ["--num-virtual-stages-per-pipeline-rank", "2"]
    whole = ranks.run(4, train, folder, [*written, *SAVE], iterations=END)
    saving = [*written, *SAVE, "--save", str(tmp_path / "ckpt"), "--save-interval", str(STOP)]
    ranks.run(4, train, folder, saving, iterations=STOP)
    for world, tp, flags in LAYOUTS.values():
        resumed = ranks.run(
            world, train, folder, [*flags.split(), *SAVE, "--load", str(tmp_path / "ckpt")], iterations=END
        )
        assert_same_run(resumed, whole, skip=STOP, tp=tp, of_tp=2, atol=1e-6)


@pytest.mark.parametrize("first", [1, 2])
def test_resume_where_the_number_of_heads_follows_tp(ranks, tmp_path, first):
    """Mamba has none, and Megatron wants a multiple of TP; it compares the number with that of the checkpoint."""
    (folder,) = ranks.run(1, write_small_model, "mamba", str(tmp_path / "model"))
    at = {1: [*SAVE], 2: ["--tensor-model-parallel-size", "2", *SAVE]}
    saving = ["--save", str(tmp_path / "ckpt"), "--save-interval", str(STOP)]
    whole = ranks.run(first, train, folder, [*at[first], *saving], iterations=END)
    last = 3 - first
    loading = ["--load", str(tmp_path / "ckpt"), "--ckpt-step", str(STOP)]
    resumed = ranks.run(last, train, folder, [*at[last], *loading], iterations=END)
    torch.testing.assert_close(losses(resumed), losses(whole)[STOP:], rtol=2e-6, atol=0)


BUCKETS = ["--global-batch-size", "12", "--overlap-grad-reduce", "--ddp-bucket-size", "2000"]


def test_resume_from_several_buckets_that_end_with_padding(ranks, tmp_path):
    folder = tiny.save("llama", tmp_path / "model")
    whole = ranks.run(3, train, folder, [*BUCKETS, *SAVE], iterations=END)
    saving = [*BUCKETS, *SAVE, "--save", str(tmp_path / "ckpt"), "--save-interval", str(STOP)]
    ranks.run(3, train, folder, saving, iterations=STOP)
    resumed = ranks.run(1, train, folder, [*BUCKETS, *SAVE, "--load", str(tmp_path / "ckpt")], iterations=END)
    assert_same_run(resumed, whole, skip=STOP, atol=1e-6)


def test_an_override_that_is_forgotten_on_resume(ranks, tmp_path):
    """Names and shapes are the same: only the numbers would be another model's."""
    folder = tiny.save("llama", tmp_path / "model")
    saved, override = tmp_path / "ckpt", ["--hf-override", "rms_norm_eps=0.3", "rope_theta=5.0"]
    whole = ranks.run(1, train, folder, [*override, *SAVE], iterations=END)
    ranks.run(
        1, train, folder, [*override, *SAVE, "--save", str(saved), "--save-interval", str(STOP)], iterations=STOP
    )
    resumed = ranks.run(1, train, folder, [*override, *SAVE, "--load", str(saved)], iterations=END)
    torch.testing.assert_close(losses(resumed), losses(whole)[STOP:], rtol=2e-6, atol=0)
    with pytest.raises(RankError) as refused:
        ranks.run(1, train, folder, [*SAVE, "--load", str(saved)], iterations=END)
    assert "rms_norm_eps: 0.3 in the checkpoint, 1e-06 in this run: --hf-override rms_norm_eps=0.3" in str(
        refused.value
    )
    assert "--hf-override rope_parameters.rope_theta=5.0" in str(refused.value)
    for anew in (["--load", str(saved), "--finetune"], ["--pretrained-checkpoint", str(saved)]):
        (report,) = ranks.run(1, train, folder, [*SAVE, *anew], iterations=1)
        assert report.iterations == 1


@pytest.mark.parametrize(
    ("kind", "then", "said"),
    [
        (
            "",
            "--train-iters 2",
            "total number of iterations, in samples, is 8 there, and 16 .*--override-opt-param-s",
        ),
        ("", "--lr 0.25", "with another --lr or --min-lr"),
        ("--use-distributed-optimizer", "--lr 0.25", "with another --lr or --min-lr"),
    ],
)
def test_other_learning_rates_than_the_checkpoints_say_what_goes_on(ranks, tmp_path, kind, then, said):
    folder, always = tiny.save("llama", tmp_path / "model"), ["--ckpt-format", "torch_dist", *kind.split()]
    saving = [*always, "--save", str(tmp_path / "ckpt"), "--save-interval", "1"]
    ranks.run(1, train, folder, saving, iterations=1)
    iterations = 2 if "iters" in then else 1
    loading = [*always, "--load", str(tmp_path / "ckpt"), *(then.split() if iterations == 1 else [])]
    with pytest.raises(RankError, match=f"CheckpointError: .*\n.*{said}"):
        ranks.run(1, train, folder, loading, iterations=iterations)


def keys_of(folder: Path) -> dict[str, list[int]]:
    """Key -> global shape of every model tensor in a checkpoint."""
    from torch.distributed.checkpoint import FileSystemReader

    metadata = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    return {key: list(value.size) for key, value in metadata.items() if hasattr(value, "size")}


def test_checkpoint_is_keyed_by_hf_names_with_global_shapes(ranks, tmp_path):
    folder = tiny.save("gpt2", tmp_path / "model")
    flags = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--no-save-optim"]
    flags += ["--ckpt-format", "torch_dist", "--save", str(tmp_path / "ckpt"), "--save-interval", "1"]
    ranks.run(4, train, folder, flags, iterations=1)
    found = keys_of(tmp_path / "ckpt" / "iter_0000001")
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny.config("gpt2"))
    expected = {name: list(p.shape) for name, p in model.named_parameters()}
    expected["transformer.wte.weight"][0] = 104  # 99 padded to a multiple of 4 x TP
    assert {name: found[name] for name in expected} == expected


def test_a_checkpoint_that_does_not_fit_is_refused_with_its_names(ranks, tmp_path):
    """Megatron would retry without strictness and leave what is missing as it was initialised."""
    folder = tiny.save("qwen2", tmp_path / "model")
    save = ["--ckpt-format", "torch_dist", "--save", str(tmp_path / "ckpt"), "--save-interval", "1"]
    ranks.run(1, train, folder, save, iterations=1)
    config = json.loads((Path(folder) / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    load = ["--ckpt-format", "torch_dist", "--load", str(tmp_path / "ckpt")]
    with pytest.raises(RankError, match=r"mlp\.(gate|up|down)_proj\.weight"):
        ranks.run(1, train, str(other), load, iterations=2)


def _load_mismatched() -> str:
    """A chunk's own load, one name missing and one too many."""
    from types import SimpleNamespace

    from megasched.plan.param_mapping import ParamMapping
    from megasched.plan.placement import Placement
    from megasched.trainer.checkpoint.entries import CheckpointMismatch
    from megasched.trainer.scheduled_model import ScheduledModel

    parameter = torch.nn.Parameter(torch.zeros(2))
    held = {"a.weight": (parameter, ParamMapping((Placement("a.weight", (2,)),)))}
    buffers = SimpleNamespace(values=dict)
    chunk = SimpleNamespace(_checkpointed=lambda: held, _buffers_saved=buffers)
    assert not issubclass(CheckpointMismatch, Exception)
    with pytest.raises(CheckpointMismatch) as stop:
        ScheduledModel.load_state_dict(chunk, {"definition.b.weight": torch.ones(2)}, strict=False)
    return str(stop.value)


def test_a_chunk_refuses_missing_and_unexpected_names_whatever_strict_says(ranks):
    message = ranks.run(1, _load_mismatched)[0]
    assert "missing:\n    a.weight" in message
    assert "unexpected:\n    definition.b.weight" in message


EP2 = "--expert-model-parallel-size 2"
OF_EXPERTS = {
    "experts": (2, EP2, "glm4_moe", {}),
    "stage-without-experts": (
        4,
        f"{EP2} --pipeline-model-parallel-size 2",
        "deepseek_v3",
        {"first_k_dense_replace": 2},
    ),
}


@pytest.mark.parametrize(
    ("case", "first"),
    [
        ("experts", "more"),
        slow("experts", "one"),
        slow("stage-without-experts", "more"),
        ("stage-without-experts", "one"),
    ],
)
def test_resume_between_ep_1_and_more(ranks, tmp_path, case, first):
    """Above EP 1 experts have an optimizer of their own, which has written its states, or is to read them."""
    world, flags, model_type, changes = OF_EXPERTS[case]
    (folder,) = ranks.run(1, small_model, model_type, str(tmp_path / "model"), changes)
    one, more = (1, SAVE), (world, [*flags.split(), *SAVE])
    before, after = (one, more) if first == "one" else (more, one)
    options = {"random_init": False}
    whole = ranks.run(1, train, folder, SAVE, iterations=END, **options)
    saving = ["--save", str(tmp_path / "ckpt"), "--save-interval", str(STOP)]
    ranks.run(before[0], train, folder, [*before[1], *saving], iterations=STOP, **options)
    loading = ["--load", str(tmp_path / "ckpt")]
    resumed = ranks.run(after[0], train, folder, [*after[1], *loading], iterations=END, **options)
    assert_same_run(resumed, whole, skip=STOP)


def test_plain_states_of_experts_stay_at_their_ep(ranks, tmp_path):
    (folder,) = ranks.run(1, small_model, "glm4_moe", str(tmp_path / "model"), {})
    options = {"random_init": False, "iterations": 1}
    saving = ["--save", str(tmp_path / "ckpt"), "--save-interval", "1", "--ckpt-format", "torch_dist"]
    ranks.run(2, train, folder, [*EP2.split(), *saving], **options)
    loading = ["--load", str(tmp_path / "ckpt"), "--ckpt-format", "torch_dist"]
    with pytest.raises(RankError, match=r"CheckpointError: .*states are of EP 2, .* can't be resumed at EP 1"):
        ranks.run(1, train, folder, loading, **options)
    (report,) = ranks.run(1, train, folder, [*loading, "--no-load-optim"], **options | {"iterations": 2})
    assert len(report.losses) == 1


@pytest.mark.parametrize(
    ("first", "then", "of"),
    [
        ("", DISTRIBUTED, f"adam without {DISTRIBUTED}, and this run has --optimizer adam {DISTRIBUTED}"),
        slow(DISTRIBUTED, "", f"adam {DISTRIBUTED}, and this run has --optimizer adam without {DISTRIBUTED}"),
        slow("", "--optimizer sgd", f"adam without {DISTRIBUTED}, and this run has --optimizer sgd without"),
    ],
    ids=["plain", "distributed", "adam"],
)
def test_states_of_another_optimizer_are_refused(ranks, tmp_path, first, then, of):
    folder, save = tiny.save("llama", tmp_path / "model"), str(tmp_path / "ckpt")
    always = ["--ckpt-format", "torch_dist", "--override-opt-param-scheduler"]
    ranks.run(1, train, folder, [*always, *first.split(), "--save", save, "--save-interval", "1"], iterations=1)
    loading = [*always, *then.split(), "--load", save]
    with pytest.raises(RankError, match=rf"CheckpointError: .* states are of --optimizer {of}.*--no-load-optim"):
        ranks.run(1, train, folder, loading, iterations=2)
    (report,) = ranks.run(1, train, folder, [*loading, "--no-load-optim"], iterations=2)
    assert len(report.losses) == 1


BLOCK = """
from megasched.model_adapters.default_schedule import schedule as default


def schedule(sch, layout):
    default(sch, layout)
    sch["model.layers.*"].level("block")
"""


def test_states_in_pieces_of_buffers_stay_where_they_are(ranks, tmp_path):
    folder, save = tiny.save("llama", tmp_path / "model"), str(tmp_path / "ckpt")
    flags = [DISTRIBUTED, "--ckpt-format", "torch_dist", "--override-opt-param-scheduler"]
    tp2 = ["--tensor-model-parallel-size", "2", *flags]
    whole = ranks.run(1, train, folder, flags, iterations=END)
    ranks.run(2, train, folder, [*tp2, "--save", save, "--save-interval", str(STOP)], iterations=STOP)
    said = (
        r"CheckpointError: .*: written at TP 2 x PP 1, loaded at TP 1 x PP 1: .*--no-load-optim; .*"
        r"--dist-ckpt-optim-fully-reshardable"
    )
    with pytest.raises(RankError, match=said):
        ranks.run(1, train, folder, [*flags, "--load", save], iterations=END)
    for world in (2, 4):  # DP 1 and 2
        resumed = ranks.run(world, train, folder, [*tp2, "--load", save], iterations=END)
        assert_same_run(resumed, whole, tp=2, skip=STOP)
    (file := tmp_path / "block.py").write_text(BLOCK)
    with pytest.raises(
        RankError, match=r"CheckpointError: .* was written with gradients elsewhere .*--no-load-optim"
    ):
        ranks.run(2, train, folder, [*tp2, "--load", save], iterations=END, schedule=str(file))
    (alone,) = ranks.run(1, train, folder, [*flags, "--load", save, "--no-load-optim"], iterations=END)
    assert alone.losses[0] == pytest.approx(losses(whole)[STOP], rel=2e-6)


WHOLE_ENDS = """
def schedule(sch, layout):
    sch["model.layers.*.mlp.gate_proj"].shard("weight", axis=0)
    sch["model.layers.*.mlp.up_proj"].shard("weight", axis=0)
    sch["model.layers.*.mlp.down_proj"].shard("weight", axis=1)
"""


@pytest.mark.parametrize("first", ["padded", "whole"])
def test_resume_where_one_run_alone_pads_the_vocabulary(ranks, tmp_path, first):
    """With files of single steps beside the checkpoints, which have names of Megatron's older format."""
    folder, save = tiny.save("llama", tmp_path / "model", vocab_size=99), str(tmp_path / "ckpt")
    (file := tmp_path / "whole.py").write_text(WHOLE_ENDS)
    tp2 = ["--tensor-model-parallel-size", "2", *SAVE]
    at = {"padded": {"schedule": "auto"}, "whole": {"schedule": str(file)}}
    then = "whole" if first == "padded" else "padded"
    whole = ranks.run(1, train, folder, SAVE, iterations=END)
    saving = ["--save", save, "--save-interval", str(STOP), "--save-params-interval", "1"]
    ranks.run(2, train, folder, [*tp2, *saving], iterations=STOP, **at[first])
    resumed = ranks.run(2, train, folder, [*tp2, "--load", save], iterations=END, **at[then])
    assert_same_run(resumed, whole, tp=2, skip=STOP)
    ranks.run(1, tiny.save, "llama", str(tmp_path / "other"), vocab_size=99, hidden_size=64)
    with pytest.raises(RankError, match=r"CheckpointError: the checkpoint .* does not fit the model"):
        ranks.run(2, train, str(tmp_path / "other"), [*tp2, "--load", save], iterations=END)
