"""Runs on ghost GPUs that are compared with what megasched says of them beforehand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from megasched.language.parallel_dims import ParallelDims
from tests import tiny
from tests.ghost.runs import LEVELS, Run, train

# Sequences in a step, over the replicas, one in a micro-batch.
SEQUENCES = 4

TP2 = {"tensor_model_parallel_size": 2}
SP2 = {**TP2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
DP2 = {"data_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2, "data_parallel_size": 2}


class Case(NamedTuple):
    """A run: architecture, level, sizes of ``ParallelDims``, flags, and whether with Transformer Engine."""

    model: str
    level: str
    parallel: dict[str, Any]
    flags: str = ""
    te: bool = False

    @property
    def layout(self) -> ParallelDims:
        return ParallelDims(**self.parallel)

    @property
    def schedule(self) -> str:
        """What ``--model-schedule`` says."""
        return self.level if self.level == "auto" else f"{LEVELS}:{self.level}"


def ordered(cases: Mapping[str, Case], fast: Sequence[str]) -> list[Any]:
    """Names of cases as parameters of a test, the fast ones first, the others marked slow."""
    return [*fast, *(pytest.param(name, marks=pytest.mark.slow) for name in cases if name not in fast)]


def run_case(case: Case, request: Any, folder: Any, sizes: Mapping[str, Any], length: int, **more: str) -> Run:
    """Trains a small model of the case's architecture.

    Args:
        request: pytest's, of the test.
        folder: an empty one, for the model's config.
        sizes: fields of the config.
        length: of a sequence.
        more: environment variables.
    """
    if case.te:
        request.getfixturevalue("transformer_engine")
    tiny.config(case.model, **sizes).save_pretrained(folder)
    # Fused attention takes no mask; Megatron's data would bring one of [s, s].
    flags = [*case.layout.flags(), *case.flags.split(), "--no-create-attention-mask-in-dataloader"]
    ranks = case.layout.world_size
    return train(folder, case.schedule, flags, ranks=ranks, te=case.te, length=length, **more)
