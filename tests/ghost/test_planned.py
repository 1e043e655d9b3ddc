"""What the planner says of memory against torch's CUDA allocator, in runs of Megatron's trainer on ghost GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ghost.cases import CP2, DP2, EP2, PP2, SEQUENCES, SP2, Case, ordered, run_case
from tests.ghost.process import INTEGERS
from tests.ghost.runs import OVERLAP
from tests.planner.memory_case import FULL, Batches, predict

LENGTH = 2048
# What the allocator rounds up to, 2 MiB, divides nearly every tensor.
SIZES = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 4}
SIZES |= {"num_hidden_layers": 4, "vocab_size": 8192, "max_position_embeddings": LENGTH}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": {"num_hidden_layers": 2},
}
TOLERANCE = 0.05

# With Transformer Engine, whose kernels a plan counts, except where they are not in it.
CASES = {
    "leaf, without TE": Case("llama", "leaf", {}),
    "fused": Case("llama", "fused", {}, te=True),
    "block": Case("llama", "block", {}, te=True),
    "fused, tp2 + sp": Case("llama", "fused", SP2, te=True),
    "block, tp2 + sp": Case("llama", "block", SP2, te=True),
    "fused, pp2": Case("llama", "fused", PP2, te=True),
    "block, cp2": Case("llama", "block", CP2, te=True),
    "fused, dp2": Case("llama", "fused", DP2, OVERLAP, te=True),
    "fused, recomputed": Case("llama", "fused", {}, FULL, te=True),
    "block, recomputed": Case("llama", "block", {}, FULL, te=True),
    "mixture": Case("mixtral", "block", {}, te=True),
    "mixture, fused": Case("mixtral", "fused", {}, te=True),
    "mixture, fused, ep2": Case("mixtral", "fused", EP2, OVERLAP, te=True),
    "mixture, ep2": Case("mixtral", "block", EP2, OVERLAP, te=True),
}
FAST = ("fused",)


@pytest.mark.parametrize("name", ordered(CASES, FAST))
def test_a_run_takes_the_memory_that_is_planned(request, tmp_path, name):
    case = CASES[name]
    layout, sizes = case.layout, {**SIZES, **MODELS[case.model]}
    # What repeats operators on the host keeps their arguments a little longer: only where numbers are read.
    integers = INTEGERS if case.model == "mixtral" or layout.cp > 1 else {}
    workspace = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}  # a plan leaves room for workspaces and does not count them
    run = run_case(case, request, tmp_path, sizes, LENGTH, **workspace, **integers)
    flags, batches = f"--bf16 {case.flags}", Batches(1, SEQUENCES // layout.data_parallel_size)
    planned = predict(str(tmp_path), layout, flags, case.schedule, batches, length=LENGTH, on_gpu=True)
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
