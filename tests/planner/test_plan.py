"""The search: what fits, in which order, and what is printed of it."""

import json
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from megasched.cli.main import main
from megasched.cli.search.plan import print_plan
from megasched.cli.show.report import inspect_schedule
from megasched.cli.show.step import StepOptions
from megasched.definition.small_models.small_models import small_config
from megasched.errors import ConfigError, ScheduleError
from megasched.language.parallel_dims import ParallelDims
from megasched.patches import active
from megasched.planner.hardware.hardware import load_hardware
from megasched.planner.measure import probe
from megasched.planner.memory import ERROR, stages_of
from megasched.planner.plan import PlanReport, plan, recompute_words, run_words, slurm_words
from megasched.planner.predict import StepFlags
from megasched.planner.search import Candidate, Job, _groups, _of_group
from megasched.printing.console import plain_console
from megasched.printing.shell_command import program
from megasched.trainer.session import open_session
from megasched.tuner.space import Space
from megasched.tuner.warm_start import read_warm_start
from tests.parity.cases import slow
from tests.planner.configs import config_of

GPUS, SEQUENCE, BATCH = 2, 256, 8

HARDWARE = """
name = "small"
memory_gib = {memory}
reserved_gib = 0.01
bf16_tflops = 1
fp32_tflops = 1
multiprocessors = 1
tile = [16, 16]
product_efficiency = 0.5
attention_efficiency = 0.5
memory_gbytes_per_s = 100
memory_efficiency = 0.5
kernel_us = 1
[node]
gpus = 4
gbytes_per_s = 10
efficiency = 0.8
latency_us = 1
[network]
gbytes_per_s = 1
efficiency = 0.8
latency_us = 10
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    config_of("llama").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def planned(model, tmp_path_factory):
    """With room for some layouts, and for all of them."""
    return [
        plan(
            model,
            gpus=GPUS,
            gpu=hardware(tmp_path_factory.mktemp("hardware"), memory),
            sequence_length=SEQUENCE,
            global_batch_size=BATCH,
        )
        for memory in (0.08, 16)
    ]


def hardware(folder, memory):
    path = folder / "small.toml"
    path.write_text(HARDWARE.format(memory=memory))
    return str(path)


def test_those_that_fit_come_fastest_first(planned):
    for report in planned:
        times = [one.time.total for one in report.fitting]
        assert times == sorted(times)
        assert all(one.fullest.total <= report.job.hardware.usable_bytes for one in report.fitting)
    small, large = planned
    assert small.out
    assert all(one.lacking > 0 for one in small.out)
    assert not large.out
    assert {one.layout for one in small.fitting} < {one.layout for one in large.fitting}


def test_every_layout_is_looked_at_once(planned):
    """TP x PP x DP is the job, the batch divides, interleaving has groups of PP micro-batches."""
    found = [one.layout for one in planned[1].fitting]
    assert len(set(found)) == len(found)
    for layout in found:
        assert layout.world_size == GPUS
        assert BATCH % (layout.data_parallel_size * layout.micro_batch_size) == 0
    shapes = {(one.tp, one.pp, one.micro_batch_size) for one in found}
    assert shapes == {(tp, pp, mb) for tp in (1, 2) for pp in (1, 2) if tp * pp <= 2 for mb in (1, 2, 4)}
    chunks = {one.vpp for one in found if (one.tp, one.pp, one.micro_batch_size) == (1, 2, 1)}
    assert chunks == {1, 2, 4}


def test_recompute_is_for_what_does_not_fit(planned):
    small, large = planned
    assert {one.recompute_granularity for one in large.fitting} == {None}
    recomputed = [one for one in small.fitting if one.recompute_granularity == "full"]
    assert recomputed
    at = {one.layout: one for one in large.fitting}
    for one in recomputed:
        assert one.fullest.activations < at[one.layout].fullest.activations
        assert one.time.compute > at[one.layout].time.compute


def test_no_more_is_recomputed_than_must_be(planned):
    """Fewer layers leave less room: all layouts of one TP and PP need as many, or more, as their batch grows."""
    found = [one for one in planned[0].fitting if one.recompute_granularity]
    partly = [one for one in found if one.recompute_num_layers is not None]
    assert partly
    at = {one.layout: one for one in planned[1].fitting}
    for one in partly:
        words = recompute_words(one)
        assert words[2:] == [
            "--recompute-method",
            "block",
            "--recompute-num-layers",
            str(one.recompute_num_layers),
        ]
        plain = at[one.layout]  # with more memory nothing is recomputed
        assert plain.time.compute < one.time.compute < 4 / 3 * plain.time.compute
        # One layer less would not fit: each saves about as much.
        layers = 8 // (one.layout.pp * one.layout.vpp)
        assert 1 <= one.recompute_num_layers < layers
        saved = (plain.fullest.total - one.fullest.total) / one.recompute_num_layers
        assert one.fullest.total + 1.5 * saved > planned[0].job.hardware.usable_bytes


@pytest.mark.parametrize("recompute", [False, True])
def test_show_predicts_what_was_planned(planned, model, recompute):
    """With the flags that the plan prints: memory of each rank, seconds, tokens."""
    report = planned[0] if recompute else planned[1]
    found = [one for one in report.fitting if (one.recompute_num_layers is not None) == recompute]
    one = next(one for one in found if one.layout.world_size == GPUS)
    flags = StepFlags(one.recompute_granularity, one.recompute_num_layers, use_distributed_optimizer=True)
    options = StepOptions(flags, report.job.hardware, one.microbatches, wanted=True)
    step = inspect_schedule("auto", model, one.layout, sequence_length=SEQUENCE, step=options).step
    assert step.prediction.memory == one.memory
    assert step.prediction.time.parts == pytest.approx(one.time.parts)
    assert step.tokens_per_second == pytest.approx(report.tokens_per_second(one))


def test_nothing_of_the_search_is_left(planned):
    assert not torch.distributed.is_initialized()
    assert "host_cuda" not in active()


def test_the_command_has_megatrons_flags(planned):
    report = planned[0]
    one = next(one for one in report.fitting if one.layout.pp == 2 and one.layout.vpp == 1)
    words = run_words(report, one)
    assert words[:2] == ["--pipeline-model-parallel-size", "2"]
    assert words[words.index("--global-batch-size") + 1] == "8"
    assert ("--use-distributed-optimizer" in words) == (one.layout.data_parallel_size > 1)
    launch = slurm_words(report, one)
    told = [*program(), "launch", "slurm", "--nodes", "1", "--gpus-per-node", "2"]
    assert launch[: len(told)] == told
    assert launch[-len(words) :] == words


def test_the_tuner_begins_with_what_was_planned(planned, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(planned[1].to_dict()))
    space = Space()
    space.choice("tp", [1, 2])
    space.choice("micro_batch_size", [1, 2, 4])
    first = space.points[read_warm_start(path, space)[0]]
    best = planned[1].fitting[0].layout
    assert first == {"tp": best.tp, "micro_batch_size": best.micro_batch_size}


def test_the_tuner_begins_with_the_layers_that_are_recomputed(planned, tmp_path):
    report = planned[0]
    partly = next(one for one in report.fitting if one.recompute_num_layers is not None)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(replace(report, fitting=[partly]).to_dict()))
    space = Space()
    count = space.integer("recompute_num_layers", 1, 8)
    assert space.points[read_warm_start(path, space)[0]] == {count.name: partly.recompute_num_layers}


def run(model, path, *more):
    words = ["--hf-model", model, "--gpus", "2", "--seq-length", "256", "--global-batch-size", "8", "--gpu", path]
    with pytest.raises(SystemExit) as end:
        main(["plan", *words, *more])
    return end.value.code


def test_the_table(planned, model, tmp_path, capsys, monkeypatch):
    """Of what was planned for the same words already."""
    monkeypatch.setattr("megasched.cli.search.plan.plan", lambda hf_model, **options: planned[0])
    page = tmp_path / "page.html"
    assert run(model, hardware(tmp_path, 0.08), "--top", "2", "--html", str(page)) == 0
    printed = capsys.readouterr().out
    assert "tokens/s/GPU" in printed
    assert "--micro-batch-size" in printed
    assert "more memory than there is, at the least" in printed
    written = page.read_text()
    assert "activations" in written
    assert "times are relative" not in written


def test_nothing_fits(model, tmp_path, capsys):
    assert run(model, hardware(tmp_path, 0.02), "--json") == 1
    assert json.loads(capsys.readouterr().out)["layouts"] == []


def test_by_how_much_memory_is_short_and_what_helps(model, tmp_path, capsys):
    assert run(model, hardware(tmp_path, 0.02)) == 1
    told = re.search(r"at the least ([\d.]+) GiB at (.*); what helps: (.*)", capsys.readouterr().out)
    assert 0 < float(told[1]) < 0.1
    assert told[3] == "--grad-reduce-in-bf16, more --gpus"  # no activations are in it yet
    assert run(model, hardware(tmp_path, 0.02), "--grad-reduce-in-bf16", "--json") == 1
    out = json.loads(capsys.readouterr().out)["out"]
    assert all(one["lacking_bytes"] > 0 for one in out if "do not fit" in one["why"])


def test_what_fits_by_less_than_the_prediction_may_be_off_is_marked(planned, capsys):
    report = planned[1]
    best = report.fitting[0]
    sizes = {ERROR / 2: True, ERROR * 2: False}
    for left, tight in sizes.items():
        gib = best.fullest.total * (1 + left) / 2**30
        job = replace(report.job, hardware=replace(report.job.hardware, memory_gib=gib, reserved_gib=0.0))
        close = replace(report, job=job, fitting=[best])
        assert close.is_tight(best) == tight
        print_plan(close, plain_console(width=200), 1)
        printed = capsys.readouterr().out
        assert (f"~{best.fullest.total / 2**30:.2f}" in printed) == tight
        assert ("may run out of memory" in printed) == tight


def test_the_command_has_the_models_folder_as_it_is(planned, capsys):
    report = replace(planned[1], hf_model="/models/[v2]", fitting=planned[1].fitting[:1])
    print_plan(report, plain_console(width=200), 1)
    assert "--hf-model '/models/[v2]'" in capsys.readouterr().out


def test_ranked_are_the_fastest_of_each_kind(planned):
    report = planned[1]
    kinds = [(one.layout.tp, one.layout.pp) for one in report.ranked()]
    assert sorted(kinds) == [(1, 1), (1, 2), (2, 1)]
    for kind, first in zip(kinds, report.ranked(), strict=True):
        alike = [one for one in report.fitting if (one.layout.tp, one.layout.pp) == kind]
        assert first.time.total == min(one.time.total for one in alike)


def test_experts_are_shared_out(tmp_path):
    config_of("mixtral").save_pretrained(tmp_path)
    report = plan(
        str(tmp_path), gpus=2, gpu=hardware(tmp_path, 16), sequence_length=SEQUENCE, global_batch_size=BATCH
    )
    at = {(one.layout.ep, one.layout.tp, one.layout.pp): one for one in reversed(report.fitting)}
    shared, whole = at[2, 1, 1], at[1, 1, 1]
    assert shared.time.sending > 0 == whole.time.sending
    assert shared.fullest.parameters < whole.fullest.parameters
    # Each rank has half of the experts and all else; the state of all is shared by both either way.
    assert shared.fullest.optimizer == whole.fullest.optimizer
    words = run_words(report, shared)
    assert words[words.index("--expert-model-parallel-size") + 1] == "2"


def test_the_state_of_experts_is_shared_over_tp():
    """Of TP 4 x EP 2 two ranks have the same experts, though there is no DP: the memory counts on the flag."""
    layout = ParallelDims(tensor_model_parallel_size=4, sequence_parallel=True, expert_model_parallel_size=2)
    report = PlanReport(Job(None, load_hardware("h100-80gb"), 4, SEQUENCE, BATCH), "x", "auto", [], [])

    def shared(layout):
        return "--use-distributed-optimizer" in run_words(report, Candidate(layout, None, 8))

    assert shared(layout)
    assert not shared(replace(layout, expert_model_parallel_size=4))
    assert not shared(replace(layout, expert_model_parallel_size=1))


def test_what_asks_for_values_is_out_with_the_reason(model, tmp_path, monkeypatch):
    def asks(*args):
        raise DataDependentOutputException(torch.ops.aten.equal.default)

    monkeypatch.setattr(probe, "_measure", asks)
    report = plan(model, gpus=1, gpu=hardware(tmp_path, 16), sequence_length=SEQUENCE, global_batch_size=BATCH)
    assert not report.fitting
    assert report.reasons() == [
        ("model.layers.0 can't be measured without values: it asks for aten.equal.default", 1)
    ]


def test_what_fails_is_out_with_the_reason(model, tmp_path, monkeypatch):
    def fails(*args):
        raise RuntimeError("shapes\ndo not fit")

    monkeypatch.setattr(probe, "_measure", fails)
    report = plan(model, gpus=1, gpu=hardware(tmp_path, 16), sequence_length=SEQUENCE, global_batch_size=BATCH)
    assert report.reasons() == [
        ("model.layers.0 can't be measured, it fails on fake tensors: RuntimeError: shapes", 1)
    ]


# It has no attention heads; its code reaches into all layers; more than a plain hidden state goes between stages.
@pytest.mark.parametrize("model_type", [slow("mamba"), slow("big_bird"), "cpmant"])
def test_models_unlike_llama(tmp_path, model_type):
    small_config(model_type).save_pretrained(tmp_path)
    report = plan(str(tmp_path), gpus=2, gpu="h100-80gb", sequence_length=32, global_batch_size=2)
    assert report.out == []
    assert {(one.layout.tp, one.layout.pp) for one in report.fitting} == {(1, 1), (2, 1), (1, 2)}


def test_what_can_not_be_cut_has_no_stages(tmp_path):
    small_config("reformer").save_pretrained(tmp_path)
    session = open_session("auto", str(tmp_path), ParallelDims())
    assert len(stages_of(session, ParallelDims(), 32)) == 1
    with pytest.raises(ScheduleError, match="be cut into pipeline stages: the model computes their gradients"):
        stages_of(session, ParallelDims(pipeline_model_parallel_size=2), 32)


def test_layers_that_run_in_loops_have_no_plan(tmp_path):
    small_config("hrm_text").save_pretrained(tmp_path)
    with pytest.raises(ScheduleError, match="layers that are called more than once are measured once"):
        plan(str(tmp_path), gpus=1, gpu="h100-80gb", sequence_length=64, global_batch_size=1)


def test_attention_whose_heads_tp_does_not_divide_is_planned_whole(tmp_path):
    small_config("deepseek_v3").save_pretrained(tmp_path)  # 4 heads, of which Megatron's config would take no TP8
    job = Job(partial(open_session, "auto", str(tmp_path)), load_hardware("h100-80gb"), 8, 64, 64)
    found, *_ = _of_group(job, ParallelDims(tensor_model_parallel_size=8))
    assert found.why_out == ""
    of_four, *_ = _of_group(job, ParallelDims(tensor_model_parallel_size=4))
    # Each rank of the eight holds all of attention.
    assert found.memory[0].parameters > of_four.memory[0].parameters


def test_layers_that_can_not_be_measured_apart_are_out_with_that_reason(tmp_path):
    small_config("qwen4_exp").save_pretrained(tmp_path)  # a run without stages takes this layout
    job = Job(partial(open_session, "auto", str(tmp_path)), load_hardware("h100-80gb"), 2, 64, 8)
    (found,) = _of_group(job, ParallelDims(context_parallel_size=2))
    assert found.why_out.startswith("not measured, as its layers would be measured like stages: more than the")


def test_8_bits_take_another_gpu(model):
    with pytest.raises(ConfigError, match="A100 SXM 80 GB has no 8-bit matrix products"):
        plan(model, gpus=1, gpu="a100-80gb", sequence_length=256, global_batch_size=1, fp8_recipe="delayed")


def test_a_job_that_can_not_be(model):
    with pytest.raises(ConfigError, match="no layout divides"):
        plan(model, gpus=16, gpu="h100-80gb", sequence_length=7, global_batch_size=1)
    with pytest.raises(ConfigError, match="give whole nodes"):
        plan(model, gpus=12, gpu="h100-80gb", sequence_length=256, global_batch_size=12)


@pytest.mark.parametrize(("length", "cp", "sizes"), [(7, 1, [1]), (12, 1, [1, 2, 4]), (12, 2, [1, 2])])
def test_a_sequence_is_cut_only_by_who_cuts_it(planned, length, cp, sizes):
    """By SP among the ranks of TP, and by CP into two pieces each."""
    job = replace(planned[1].job, gpus=8, sequence_length=length)
    assert [group.tp for group in _groups(job, cp)] == sizes


def test_what_the_second_rank_shows_holds_for_all(model, tmp_path):
    """Three stages and more: a layout is out early where the rank of all that is fullest has no room either."""

    def planned(memory):
        path = tmp_path / "one.toml"
        path.write_text(HARDWARE.format(memory=memory).replace("gpus = 4", "gpus = 1"))  # no TP
        return plan(model, gpus=4, gpu=str(path), sequence_length=SEQUENCE, global_batch_size=4)

    small, large = planned(0.05), planned(16)
    room = small.job.hardware.usable_bytes
    enough = {one.layout for one in large.fitting if one.fullest.total <= room}
    assert {one.layout for one in small.fitting if one.recompute_granularity is None} == enough
    early = [one for one in small.out if one.layout.pp > 2 and not one.memory]
    assert early
    assert all("do not fit" in one.why_out for one in early)
