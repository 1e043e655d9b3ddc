"""What the planner says of memory against torch's CUDA allocator, in runs of Megatron's trainer on ghost GPUs."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from megasched.language.parallel_dims import ParallelDims
from tests import tiny
from tests.ghost.process import INTEGERS
from tests.ghost.runs import LEVELS, train
from tests.planner.memory_case import FULL, Batches, predict

LENGTH = 2048
# What the allocator rounds up to, 2 MiB, divides nearly every tensor.
SIZES = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 4}
SIZES |= {"num_hidden_layers": 4, "vocab_size": 8192, "max_position_embeddings": LENGTH}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": {"num_hidden_layers": 2},
}
# Four sequences in a step, over the replicas, one in a micro-batch.
SEQUENCES = 4
TOLERANCE = 0.05

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2, "data_parallel_size": 2}
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


class Case(NamedTuple):
    """A run; with Transformer Engine, whose kernels a plan counts, except where they are not in it."""

    model: str
    level: str
    parallel: dict[str, Any]
    flags: str = ""
    te: bool = True


CASES = {
    "leaf, without TE": Case("llama", "leaf", {}, te=False),
    "fused": Case("llama", "fused", {}),
    "block": Case("llama", "block", {}),
    "fused, tp2 + sp": Case("llama", "fused", TP2),
    "block, tp2 + sp": Case("llama", "block", TP2),
    "fused, pp2": Case("llama", "fused", PP2),
    "block, cp2": Case("llama", "block", {"context_parallel_size": 2}),
    "fused, dp2": Case("llama", "fused", {"data_parallel_size": 2}, SHARDED),
    "fused, recomputed": Case("llama", "fused", {}, FULL),
    "block, recomputed": Case("llama", "block", {}, FULL),
    "mixture": Case("mixtral", "block", {}),
    "mixture, ep2": Case("mixtral", "block", EP2, SHARDED),
}
FAST = ("leaf, without TE",)


ORDERED = [*FAST, *(pytest.param(case, marks=pytest.mark.slow) for case in CASES if case not in FAST)]


@pytest.mark.parametrize("name", ORDERED)
def test_a_run_takes_the_memory_that_is_planned(request, tmp_path, name):
    case = CASES[name]
    if case.te:
        request.getfixturevalue("transformer_engine")
    tiny.config(case.model, **{**SIZES, **MODELS[case.model]}).save_pretrained(tmp_path)
    layout = ParallelDims(**case.parallel)
    run = train(
        tmp_path,
        case.level,
        # Fused attention takes no mask; Megatron's data would bring one of [s, s].
        [*layout.flags(), *case.flags.split(), "--no-create-attention-mask-in-dataloader"],
        ranks=layout.world_size,
        te=case.te,
        length=LENGTH,
        CUBLAS_WORKSPACE_CONFIG=":16:8",  # a plan leaves room for workspaces and does not count them
        # What repeats operators on the host keeps their arguments a little longer: only where numbers are read.
        **(INTEGERS if case.model == "mixtral" or layout.cp > 1 else {}),
    )
    flags, batches = f"--bf16 {case.flags}", Batches(1, SEQUENCES // layout.data_parallel_size)
    schedule = f"{LEVELS}:{case.level}"
    planned = predict(str(tmp_path), layout, flags, schedule, batches, length=LENGTH, on_gpu=True)
    for rank, facts in enumerate(run.facts):
        plan, step = planned[rank // (layout.world_size // layout.pp)], facts["steps"][-1]
        found = {
            "built": facts["built"],
            "optimizer": step["begin"] - facts["built"],
            "step": step["peak"] - step["begin"],
            "total": step["peak"],
        }
        assert found == pytest.approx(
            {
                "built": plan.parameters + plan.gradients,
                "optimizer": plan.optimizer + plan.held,
                "step": plan.activations,
                "total": plan.total,
            },
            rel=TOLERANCE,
        )
