"""What a layout sends, counted on a small Llama: hidden 32, MLP 64, eight heads and two kv heads of 4."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from megasched.cli.show.report import inspect_schedule
from megasched.cli.show.step import StepOptions
from megasched.cli.show.volumes import Volume, describe_volumes, missing_note
from megasched.definition.small_models.small_models import small_config
from megasched.language.parallel_dims import ParallelDims
from megasched.planner.groups import CONTEXT, EXPERT, TENSOR
from megasched.planner.measure.parameter_counts import ParameterCounts
from megasched.planner.memory import stages_of, static_bytes
from megasched.planner.plan import _opened_sessions
from megasched.planner.predict import StepFlags
from tests import tiny

TOKENS = 16
TP2 = {"tensor_model_parallel_size": 2}
SP2 = {**TP2, "sequence_parallel": True}
# Megatron's groups of ranks, and torch's operations -> as `show` has them.
GROUPS = {TENSOR: "TP", CONTEXT: "CP", EXPERT: "EP"}
OPERATIONS = {
    "allreduce": "all_reduce",
    "reduce_scatter_base": "reduce_scatter",
    "allgather_base": "all_gather",
    "alltoall_base": "all_to_all",
}


def volumes(report):
    return {(v.group, v.what, v.op, v.phase): v for v in describe_volumes(report)}


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("deepseek_v3", TP2),
        ("deepseek_v3", SP2),
        ("qwen3_next", {**SP2, "context_parallel_size": 2}),
        ("llama4_text", SP2),
        ("llama4_text", {**TP2, "expert_model_parallel_size": 2}),  # each expert takes all tokens
        ("dbrx", SP2),
        ("deepseek_v4", SP2),  # of four residual streams
        ("xlnet", TP2),  # whose logits are gathered, with the padding of the vocabulary
    ],
)
def test_the_table_has_what_a_run_of_the_program_sends(tmp_path, family, layout):
    """Bytes and times over TP, CP and EP equal those that the planner counts as the scheduled modules run."""
    small_config(family).save_pretrained(tmp_path)
    _compare(tmp_path, layout, StepOptions(wanted=True))


def test_each_tensor_that_enters_a_region_is_sent(tmp_path):
    """Two enter the shared layers of Zamba2, and the mixers that read what these make."""
    small_config("zamba2").save_pretrained(tmp_path)
    layout, step = ParallelDims(**SP2), StepOptions(wanted=True)
    report = inspect_schedule("auto", str(tmp_path), layout, sequence_length=4 * TOKENS, step=step)
    shown = sum(v.times for v in describe_volumes(report) if (v.op, v.phase) == ("all_gather", "forward"))
    forward, _ = report.step.prediction.sent
    assert shown == sum(times for one, times in forward.items() if one.operation == "allgather_base") == 11


@pytest.mark.parametrize(("layout", "count"), [(TP2, None), (SP2, None), (TP2, 1)])
def test_what_is_computed_again_is_sent_again(tmp_path, layout, count):
    small_config("llama").save_pretrained(tmp_path)
    flags = StepFlags(recompute_granularity="full", recompute_num_layers=count)
    report = _compare(tmp_path, layout, StepOptions(flags))
    again = [volume for volume in describe_volumes(report) if "computed again" in volume.what]
    assert {(volume.group, volume.phase) for volume in again} == {("TP", "backward")}
    assert sum(volume.times for volume in again) == (count or 4) * (3 if layout == SP2 else 1)


@pytest.mark.parametrize("layout", [TP2, SP2])
@pytest.mark.parametrize("adapted", ["self_attn.q_proj", "mlp.down_proj"])
def test_no_backward_reaches_what_stands_before_the_first_adapter(tmp_path, layout, adapted):
    small_config("llama").save_pretrained(tmp_path)
    schedule = tmp_path / "lora.py"
    schedule.write_text(
        "from megasched.model_adapters.default_schedule import schedule as auto\n\n\n"
        "def schedule(sch, layout):\n    auto(sch, layout)\n"
        f"    for layer in sch['model.layers']:\n        layer['{adapted}'].adapt(rank=4)\n"
    )
    _compare(tmp_path, layout, StepOptions(wanted=True), str(schedule))


def test_a_schedule_that_recomputes_sends_again(inspect):
    plain, again = (
        sum(volume.times for volume in describe_volumes(inspect(*lines, tp=2, sequence_length=TOKENS)))
        for lines in ((), ('sch["model.layers.*"].checkpoint()',))
    )
    assert again == plain + 4


def _compare(tmp_path, layout, step, schedule="auto"):
    report = inspect_schedule(
        schedule, str(tmp_path), ParallelDims(**layout), sequence_length=4 * TOKENS, step=step
    )
    shown: Counter[tuple[str, str, str, str]] = Counter()
    for volume in describe_volumes(report):
        if volume.group in GROUPS.values():
            key = volume.group, volume.op, volume.phase
            shown[*key, "times"] += volume.times
            shown[*key, "bytes"] += volume.bytes
    measured: Counter[tuple[str, str, str, str]] = Counter()
    for phase, operations in zip(("forward", "backward"), report.step.prediction.sent, strict=True):
        for one, times in operations.items():
            key = GROUPS[one.group], OPERATIONS[one.operation], phase
            measured[*key, "times"] += times
            measured[*key, "bytes"] += times * one.bytes
    assert shown == measured
    return report


@pytest.mark.parametrize(("family", "width"), [("gemma3n_text", 512), ("deepseek_v4", 260)])
def test_stages_send_what_later_layers_read_too(tmp_path, family, width):
    small_config(family).save_pretrained(tmp_path)
    layout = ParallelDims(pipeline_model_parallel_size=2)
    report = inspect_schedule("auto", str(tmp_path), layout, sequence_length=4 * TOKENS)
    (sent, _) = [volume for volume in describe_volumes(report) if volume.group == "PP"]
    assert sent.values == 4 * TOKENS * width


def test_what_could_not_be_measured_is_said(inspect):
    report = inspect(step=StepOptions(StepFlags("full")), sequence_length=TOKENS)
    assert missing_note(replace(report, step=replace(report.step, why_not="it asks for values"))) == ""
    layout = replace(report.layout, tensor_model_parallel_size=2, context_parallel_size=2)
    report = replace(report, layout=layout, step=replace(report.step, why_not="it asks for values"))
    told = "not known is what is sent over CP and as layers are computed again: it asks for values"
    assert missing_note(report) == told


def test_the_loss_of_logits_that_are_cut_sums_three_numbers_of_each_label(inspect):
    (of_loss,) = [
        volume for volume in describe_volumes(inspect(tp=2, sequence_length=TOKENS)) if "loss" in volume.what
    ]
    assert of_loss == Volume("TP", "lm_head: loss", "all_reduce", "forward", 3, TOKENS, 4)


def test_context_parallel_attention_passes_keys_and_values_on(llama):
    """Each of four layers sends both, 2 heads of 4 numbers, and in the backward their gradients too."""
    report = inspect_schedule("auto", llama, ParallelDims(context_parallel_size=2), sequence_length=TOKENS)
    sent = [volume for volume in describe_volumes(report) if volume.group == "CP"]
    assert [(v.op, v.phase, v.times, v.values) for v in sent] == [
        ("all_gather", "forward", 2 * 4, TOKENS * 2 * 4),
        ("all_gather", "backward", 4 * 4, TOKENS * 2 * 4),
    ]


def test_a_row_that_takes_its_part_of_the_whole_sends_nothing_for_it(tmp_path, llama):
    schedule = tmp_path / "rows.py"
    schedule.write_text(
        "def schedule(sch, layout):\n    sch['model.layers.*.mlp.down_proj'].shard('weight', axis=1)\n"
    )
    layout = ParallelDims(tensor_model_parallel_size=2)
    report = inspect_schedule(str(schedule), llama, layout, sequence_length=TOKENS)
    assert [(v.op, v.phase, v.times, v.values) for v in describe_volumes(report)] == [
        ("all_reduce", "forward", 4, TOKENS * 32),
        ("all_gather", "backward", 4, TOKENS * 64),
    ]


def test_one_rank_sends_nothing(inspect):
    assert describe_volumes(inspect()) == []


def test_tensor_parallel_layers_are_counted_together(inspect):
    found = volumes(inspect(tp=2, sequence_length=TOKENS))
    for module in ("model.layers.*.self_attn.o_proj", "model.layers.*.mlp.down_proj"):
        assert found["TP", f"{module}: output", "all_reduce", "forward"].values == TOKENS * 32
        assert found["TP", f"{module}: output", "all_reduce", "forward"].times == 4
    both = found["TP", "model.layers.*.mlp: input", "all_reduce", "backward"]  # gate_proj and up_proj share it
    assert (both.times, both.values, both.bytes) == (4, TOKENS * 32, 4 * TOKENS * 32 * 2)
    assert {volume.group for volume in found.values()} == {"TP"}


def test_sequence_parallel_gathers_and_scatters_the_whole(inspect):
    found = volumes(inspect(tp=2, sp=True, sequence_length=TOKENS))
    assert found["TP", "model.layers.*.mlp: input", "all_gather", "forward"].values == TOKENS * 32
    assert not [key for key in found if key[1].startswith("model.layers") and key[2] == "all_reduce"]
    ends = {key[1:]: volume for key, volume in found.items() if key[1].startswith("model.layers: hidden state")}
    assert [key[1:] for key in ends] == [("all_gather", "forward"), ("all_gather", "backward")]
    assert {(volume.times, volume.values) for volume in ends.values()} == {(1, TOKENS * 32)}


@pytest.mark.parametrize(("sp", "shared"), [(False, 1), (True, 2)])
def test_stages_send_the_hidden_state(inspect, sp, shared):
    report = inspect(tp=2, sp=sp, pp=2, vp=2, sequence_length=TOKENS)
    sent = [volume for volume in describe_volumes(report) if volume.group == "PP"]
    values = TOKENS * 32 // shared
    assert sent == [
        Volume("PP", "hidden state to the next stage", "send", "forward", 3, values),
        Volume("PP", "its gradient to the stage before", "send", "backward", 3, values),
    ]
    (unknown, _) = [v for v in describe_volumes(replace(report, sent_width=None)) if v.group == "PP"]
    assert (unknown.values, unknown.bytes) == (None, None)


def test_gradients_of_the_largest_rank(inspect):
    report = inspect(pp=2)
    report = replace(report, layout=replace(report.layout, data_parallel_size=4))
    (reduced,) = [volume for volume in describe_volumes(report) if volume.group == "DP"]
    assert reduced.values == max(stage.parameters for stage in report.stages)
    assert (reduced.op, reduced.times, reduced.phase) == ("all_reduce", 1, "step")
    assert reduced.bytes == 4 * reduced.values


def test_a_distributed_optimizer_scatters_gradients_and_gathers_parameters(inspect):
    flags = StepFlags(use_distributed_optimizer=True, grad_reduce_in_bf16=True)
    report = inspect(step=StepOptions(flags))
    report = replace(report, layout=replace(report.layout, data_parallel_size=4))
    values = report.stages[0].parameters
    assert describe_volumes(report) == [
        Volume("DP", "gradients of the largest pipeline rank", "reduce_scatter", "step", 1, values, 2),
        Volume("DP", "parameters of the largest pipeline rank", "all_gather", "step", 1, values, 2),
    ]


def test_mixtures_send_pairs_to_experts_and_back(tmp_path):
    """Two of each token: hidden states there and back, and a weight each, through every layer."""
    config = tiny.config("mixtral")
    tiny.save("mixtral", tmp_path)
    layout = ParallelDims(expert_model_parallel_size=2, data_parallel_size=2, micro_batch_size=3)
    report = inspect_schedule("auto", str(tmp_path), layout, sequence_length=TOKENS)
    pairs, layers = 3 * TOKENS * config.num_experts_per_tok, config.num_hidden_layers
    sent = [volume for volume in describe_volumes(report) if volume.group == "EP"]
    assert [(v.op, v.phase, v.times, v.values, v.value_bytes) for v in sent] == [
        ("all_to_all", phase, times, values, 2)
        for phase in ("forward", "backward")
        for times, values in ((2 * layers, pairs * config.hidden_size), (layers, pairs))
    ]


@pytest.mark.parametrize(("family", "ep", "pp"), [("gemma3", 1, 1), ("gemma3", 1, 2), ("mixtral", 2, 1)])
def test_gradients_are_those_that_a_plan_counts(tmp_path, family, ep, pp):
    """Of a tower that no token reaches there are none; of experts, those of a rank."""
    small_config(family).save_pretrained(tmp_path)
    layout = ParallelDims(
        expert_model_parallel_size=ep, pipeline_model_parallel_size=pp, data_parallel_size=2 * ep
    )
    session = _opened_sessions(str(tmp_path), "auto", TOKENS, {})(layout)
    stages = stages_of(session, layout, TOKENS)
    counts = [ParameterCounts(session).held(stages[rank::pp]) for rank in range(pp)]
    planned = [static_bytes(one, layout, torch.bfloat16, torch.float32, sharded=True)[1] for one in counts]
    report = inspect_schedule("auto", str(tmp_path), layout, sequence_length=TOKENS)
    sent = [volume for volume in describe_volumes(report) if "gradients" in volume.what]
    assert sum(volume.bytes for volume in sent) == max(planned)
    assert sum(stage.state_bytes[1] for stage in report.stages) == sum(planned)


def test_gradients_are_summed_over_replicas_of_what_is_trained(inspect, tmp_path):
    """Ranks of CP share all weights; those of EP, experts alone not."""
    report = inspect()
    report = replace(report, layout=replace(report.layout, context_parallel_size=2))
    assert [volume.group for volume in describe_volumes(report)] == ["DP"]
    tiny.save("mixtral", tmp_path)
    for replicas, wanted in ((2, ["gradients"]), (4, ["gradients", "gradients of experts"])):
        layout = ParallelDims(expert_model_parallel_size=2, data_parallel_size=replicas)
        report = inspect_schedule("auto", str(tmp_path), layout)
        found = [volume for volume in describe_volumes(report) if volume.group == "DP"]
        assert [volume.what for volume in found] == [f"{what} of the largest pipeline rank" for what in wanted]
        assert sum(volume.values for volume in found) == sum(
            stage.parameters if len(wanted) > 1 else stage.gradients for stage in report.stages
        )
        assert all(0 < stage.gradients < stage.parameters for stage in report.stages)


def test_layers_that_run_in_loops_send_in_each_pass(tmp_path):
    config = small_config("hrm_text")
    config.save_pretrained(tmp_path)
    report = inspect_schedule("auto", str(tmp_path), ParallelDims(tensor_model_parallel_size=2))
    low, high = config.H_cycles * config.L_cycles, config.H_cycles
    assert low > high > 1
    notes = {module.path: module.notes for module in report.modules if module.notes}
    assert notes["model.L_module"] == (f"called {low} times in a forward",)
    assert notes["model.H_module"] == (f"called {high} times in a forward",)
    assert not any("times in a forward" in note for note in notes.get("model.L_module.layers.0", ()))
    found = volumes(report)
    for stack, times in (("L_module", low), ("H_module", high)):
        sent = found["TP", f"model.{stack}.layers.*.self_attn.o_proj: output", "all_reduce", "forward"]
        assert sent.times == 4 * times
