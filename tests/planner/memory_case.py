"""A run and its prediction: the flags of one, and what the planner says of the same layout."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megasched.language.parallel_dims import ParallelDims
from megasched.planner.measure.build_stage import Setting
from megasched.planner.measure.probe import fake_groups
from megasched.planner.measure.stages import Measurements, PartlyRecomputed
from megasched.planner.memory import RankMemory, rank_memory, stages_of
from megasched.trainer.session import open_session
from tests.planner.configs import VOCABULARY

SEQUENCE = 256
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers 2"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


class Batches(NamedTuple):
    """Samples of a micro-batch, and how many of them a replica takes a step."""

    samples: int
    microbatches: int


MANY = Batches(samples=4, microbatches=4)


def argv_of(layout: ParallelDims, flags: str, batches: Batches = MANY) -> list[str]:
    batch = batches.samples * batches.microbatches * layout.data_parallel_size
    sizes = {"seq-length": SEQUENCE, "max-position-embeddings": 1024, "vocab-size": VOCABULARY}
    sizes |= {"micro-batch-size": batches.samples, "global-batch-size": batch}
    return [*layout.flags(), *flags.split(), *(word for k, v in sizes.items() for word in (f"--{k}", str(v)))]


def predict(
    folder: str,
    layout: ParallelDims,
    flags: str,
    schedule: str = "auto",
    batches: Batches = MANY,
    *,
    length: int = SEQUENCE,
    on_gpu: bool = False,
) -> list[RankMemory]:
    """Of each pipeline rank; with a CPU's kernels, as a rehearsal has them, or those of a GPU."""
    trust = "--trust-remote-code" in flags
    session = open_session(schedule, folder, layout, make_vocab_size_divisible_by=4, trust_remote_code=trust)
    dtype = torch.bfloat16 if "--bf16" in flags else torch.float32
    sharded = "--use-distributed-optimizer" in flags
    with fake_groups(layout):
        plain, full = (
            Measurements(session, Setting(batches.samples, length, dtype, how, on_gpu=on_gpu))
            for how in (None, "full")
        )
        measured = PartlyRecomputed(plain, full, 2) if BLOCK in flags else full if FULL in flags else plain
        return [
            rank_memory(
                measured,
                stages_of(session, layout, length),
                layout,
                rank,
                microbatches=batches.microbatches,
                sharded=sharded,
            )
            for rank in range(layout.pp)
        ]
