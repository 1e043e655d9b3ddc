"""What the planner says of memory against what a rehearsal of the trainer really holds."""

import pytest
import torch

from megasched.layout import Layout
from megasched.megatron.session import open_session
from megasched.planner.measurements import Measurements
from megasched.planner.memory import rank_memory, stages_of
from megasched.planner.probe import Setting, fake_groups
from tests.planner.configs import VOCABULARY, config_of
from tests.planner.rank_case import step_peak

SEQUENCE, BATCH, MICROBATCHES = 256, 4, 4
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
VPP2 = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

# bench/memory_plan.py has the full table; these are one of each kind.
CASES = [
    ("llama", TP2, "--bf16", 0.02),
    ("llama", VPP2, FULL, 0.03),
    ("gpt2", {"pipeline_model_parallel_size": 2}, "", 0.02),
    ("mixtral", {"data_parallel_size": 2}, "--use-distributed-optimizer", 0.02),
]


@pytest.mark.parametrize(("name", "parallel", "flags", "tolerance"), CASES)
def test_the_peak_of_a_step_is_as_measured(ranks, tmp_path, name, parallel, flags, tolerance):
    config_of(name).save_pretrained(tmp_path)
    layout = Layout(**parallel)
    held = ranks.run(layout.world_size, step_peak, str(tmp_path), argv_of(layout, flags))
    predicted = predict(str(tmp_path), layout, flags)
    for rank, found in enumerate(held):
        pp_rank = rank // (layout.world_size // layout.pp)
        assert predicted[pp_rank].total == pytest.approx(found["peak"], rel=tolerance)


def argv_of(layout, flags):
    batch = BATCH * MICROBATCHES * layout.data_parallel_size
    sizes = {"seq-length": SEQUENCE, "max-position-embeddings": 1024, "vocab-size": VOCABULARY}
    sizes |= {"micro-batch-size": BATCH, "global-batch-size": batch}
    return [*layout.flags(), *flags.split(), *(word for k, v in sizes.items() for word in (f"--{k}", str(v)))]


def predict(folder, layout, flags):
    """Of each pipeline rank."""
    session = open_session("auto", folder, layout, make_vocab_size_divisible_by=4)
    setting = Setting(
        BATCH,
        SEQUENCE,
        torch.bfloat16 if "--bf16" in flags else torch.float32,
        "full" if FULL in flags else None,
    )
    shards = layout.data_parallel_size if "--use-distributed-optimizer" in flags else 1
    with fake_groups(layout):
        measured = Measurements(session, setting)
        return [
            rank_memory(
                measured,
                stages_of(session, layout, SEQUENCE),
                layout,
                rank,
                microbatches=MICROBATCHES,
                shards=shards,
            )
            for rank in range(layout.pp)
        ]
