"""What ``show`` says that ranks send against what NCCL is asked for, in runs of the trainer on ghost GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from megasched.cli.show.report import ShowReport, inspect_schedule
from megasched.cli.show.step import StepOptions
from megasched.cli.show.volumes import describe_volumes
from megasched.language.parallel_dims import ParallelDims
from megasched.planner.predict import StepFlags
from tests.ghost.cases import CP2, DP2, EP2, PP2, SEQUENCES, SP2, TP2, Case, ordered, run_case
from tests.ghost.process import INTEGERS
from tests.ghost.runs import OVERLAP, Run

LENGTH = 64
# Megatron's distributed optimizer pads its buffers to multiples of 128 numbers.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"num_hidden_layers": 4, "vocab_size": 512, "max_position_embeddings": LENGTH}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "gpt2": {"n_embd": 128, "n_head": 4, "n_layer": 4, "vocab_size": 512, "n_positions": LENGTH},
    "mixtral": SIZES,
}
CASES = {
    "fused, tp2 + sp": Case("llama", "fused", SP2),
    "leaf, tp2 + sp": Case("llama", "leaf", SP2),
    "auto, gpt2, tp2 + sp": Case("gpt2", "auto", SP2),
    "block, tp2 + sp, te": Case("llama", "block", SP2, te=True),
    "block, tp2 + sp": Case("llama", "block", SP2),
    "fused, tp2": Case("llama", "fused", TP2),
    "block, tp2, te": Case("llama", "block", TP2, te=True),
    "fused, pp2": Case("llama", "fused", PP2),
    "block, tp2 + sp, pp2": Case("llama", "block", {**SP2, **PP2}),
    "fused, cp2, te": Case("llama", "fused", CP2, te=True),
    "block, cp2, te": Case("llama", "block", CP2, te=True),
    "fused, dp2": Case("llama", "fused", DP2),
    "fused, dp2, overlapped": Case("llama", "fused", DP2, OVERLAP),
    "block, dp2, overlapped, te": Case("llama", "block", DP2, OVERLAP, te=True),
    "mixture, ep2, te": Case("mixtral", "block", EP2, te=True),
    "mixture, ep2, overlapped, te": Case("mixtral", "block", EP2, OVERLAP, te=True),
}
FAST = ("fused, tp2 + sp",)

# What Megatron's groups are for -> as ``show`` names them.
GROUPS = {
    "TENSOR_MODEL_PARALLEL_GROUP": "TP",
    "PIPELINE_MODEL_PARALLEL_GROUP": "PP",
    "DATA_PARALLEL_GROUP_WITH_CP": "DP",
    "EXPERT_DATA_PARALLEL_GROUP": "DP",
}
OPERATIONS = {"AllReduce": "all_reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter"}
OPERATIONS |= {"Send": "send", "Broadcast": "broadcast"}
BYTES = {"bfloat16": 2, "float32": 4, "int64": 8, "int32": 4}

# (group, operation, bytes of the whole tensor)
Sent = tuple[str, str, int]


def sent(events: list[str], groups: Mapping[str, str]) -> Iterator[Sent]:
    """Yields what a rank sends of what ``show`` tells of, over TP of what is in 16 bits.

    The batch, the loss's numbers of each token over TP, and gradients of what sequence parallelism leaves whole
    are in 32 or 64 bits, and layers send 16. Over DP ``show`` leaves out the log's loss and count of tokens. Other
    groups are not compared: in them, the norm of gradients and flags are summed, and context parallelism and
    mixtures send.
    """
    for event in events:
        if not event.startswith("nccl:"):
            continue
        what, count, dtype, name, place, *_ = event.removeprefix("nccl:").split()
        group, size = GROUPS.get(groups.get(name, "")), int(place.partition("/")[2])
        if group is None or size == 1 or what == "Recv":
            continue
        of_layers = dtype == "bfloat16" or (group == "DP" and dtype == "float32" and int(count) > 2)
        if of_layers:
            whole = int(count) * (size if what in ("AllGather", "ReduceScatter") else 1)
            yield group, OPERATIONS[what], whole * BYTES[dtype]


def found_in(run: Run, layout: ParallelDims) -> Counter[Sent]:
    """What one replica of the model sends in the last step, each operation once for the ranks that take part."""
    found: Counter[Sent] = Counter()
    for steps, facts in zip(run.steps, run.facts, strict=True):
        found.update(sent(steps[-1], facts["groups"]))
    alike = layout.world_size // layout.pp
    assert all(times % alike == 0 for times in found.values())
    return Counter({one: times // alike for one, times in found.items()})


def shown_by(report: ShowReport) -> Counter[Sent]:
    found: Counter[Sent] = Counter()
    microbatches = SEQUENCES // report.layout.data_parallel_size
    volumes = [one for one in describe_volumes(report) if one.group not in ("CP", "EP")]
    for volume in (one for one in volumes if one.group != "TP" or one.value_bytes == 2):
        assert volume.bytes is not None
        times = volume.times * (1 if volume.phase == "step" else microbatches)
        found[volume.group, volume.op, volume.bytes // volume.times] += times
    return found


@pytest.mark.parametrize("name", ordered(CASES, FAST))
def test_ranks_send_what_is_shown(request, tmp_path, name):
    case = CASES[name]
    run = run_case(case, request, tmp_path, MODELS[case.model], LENGTH, **INTEGERS)
    assert run.faults() == []
    step = StepOptions(StepFlags(use_distributed_optimizer="--use-distributed-optimizer" in case.flags))
    report = inspect_schedule(case.schedule, str(tmp_path), case.layout, sequence_length=LENGTH, step=step)
    assert found_in(run, case.layout) == shown_by(report)
