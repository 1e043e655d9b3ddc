"""What the planner says of memory against what a rehearsal of the trainer really holds."""

from pathlib import Path

import pytest

from megasched.language.parallel_dims import ParallelDims
from tests.own_losses import LOSSES, write
from tests.planner.configs import config_of
from tests.planner.memory_case import BLOCK, FULL, MANY, Batches, argv_of, predict
from tests.planner.rank_case import step_peak

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
VPP2 = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}

# Where a CPU has no instructions for bf16, a product in it takes 60 times as long.
FEW = Batches(samples=1, microbatches=2)
# bench/memory_plan.py has the full table; these are one of each kind.
CASES = [
    ("llama", TP2, "--bf16", 0.02),
    ("llama", VPP2, FULL, 0.03),
    ("llama", {"pipeline_model_parallel_size": 2}, BLOCK, 0.03),
    ("gpt2", {"pipeline_model_parallel_size": 2}, "", 0.02),
    ("mixtral", {"data_parallel_size": 2}, "--use-distributed-optimizer", 0.02),
]
LORA = str(Path(__file__).parents[2] / "examples" / "schedules" / "lora.py")


@pytest.mark.parametrize(("name", "parallel", "flags", "tolerance"), CASES)
def test_the_peak_of_a_step_is_as_measured(ranks, tmp_path, name, parallel, flags, tolerance):
    assert_predicted(ranks, tmp_path, "auto", name, parallel, flags, tolerance)


def test_frozen_weights_have_no_gradients_and_no_states(ranks, tmp_path):
    """Nothing before the first layer is trained, so the backward pass ends in it. It keeps less than the layers
    that it is taken to be like: of four on this stage that is 5 %."""
    assert_predicted(ranks, tmp_path, LORA, "llama", {"pipeline_model_parallel_size": 2}, "--bf16", 0.06)


def assert_predicted(ranks, tmp_path, schedule, name, parallel, flags, tolerance):
    config_of(name).save_pretrained(tmp_path)
    assert_predicted_of(ranks, str(tmp_path), schedule, parallel, flags, tolerance)


def test_whole_logits_of_a_loss_of_its_own_are_counted(ranks, tmp_path):
    """What is kept of them is a large part of what a rank holds."""
    changes = config_of("llama").to_dict() | {"num_hidden_layers": 2}
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "max_position_embeddings")
    folder = write(tmp_path / "model", LOSSES["two heads"], **{name: changes[name] for name in kept})
    assert_predicted_of(ranks, folder, "auto", TP2, "--trust-remote-code", 0.03)


def assert_predicted_of(ranks, folder, schedule, parallel, flags, tolerance):
    layout = ParallelDims(**parallel)
    batches = FEW if "--bf16" in flags else MANY
    argv = argv_of(layout, flags, batches)
    held = ranks.run(layout.world_size, step_peak, folder, argv, schedule=schedule)
    predicted = predict(folder, layout, flags, schedule, batches)
    for rank, found in enumerate(held):
        pp_rank = rank // (layout.world_size // layout.pp)
        assert predicted[pp_rank].total == pytest.approx(found["peak"], rel=tolerance)
