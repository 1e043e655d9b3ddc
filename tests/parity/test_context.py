"""Context parallelism: ranks that have two pieces of each sequence compute what HF computes of all of it."""

from __future__ import annotations

import pytest
import torch

from megasched.definition.small_models.small_models import write_small_model
from megasched.verify.ranks.pool import RankError
from megasched.verify.reference import IGNORED
from megasched.verify.trainer_run import train
from tests import tiny
from tests.parity.cases import slow
from tests.parity.steps import assert_first_step_equals_hf, assert_same_losses, one_rank

CP = "--context-parallel-size 2"
TP = "--tensor-model-parallel-size 2"
PP = "--pipeline-model-parallel-size 2"
LAYOUTS: dict[str, tuple[int, int, str]] = {
    "cp2": (2, 1, CP),
    "cp4": (4, 1, "--context-parallel-size 4"),
    "cp2-tp2": (4, 2, f"{CP} {TP}"),
    "cp2-tp2-sp": (4, 2, f"{CP} {TP} --sequence-parallel"),
    "cp2-pp2-vpp2": (4, 1, f"{CP} {PP} --num-virtual-stages-per-pipeline-rank 2"),
    "cp2-dp2": (4, 1, CP),
}
# Sequences are 16 long, windows 5, so a window reaches from one rank's piece into another's.
CASES = [
    ("gemma2", "cp2-pp2-vpp2"),
    ("qwen3", "cp2-tp2-sp"),
    ("mistral", "cp2"),
    ("opt", "cp2"),
    *(slow("gemma2", layout) for layout in ("cp2", "cp2-tp2-sp")),
    *(slow("mistral", layout) for layout in ("cp4", "cp2-tp2")),
    slow("llama", "cp2-dp2"),
    slow("opt", "cp2-pp2-vpp2"),
    slow("gemma2", "cp4"),
    slow("qwen3", "cp2-dp2"),
    slow("gpt2", "cp2-pp2-vpp2"),
    slow("gpt_neox", "cp2-tp2-sp"),
]


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_steps_equal_hf(ranks, tmp_path, family, layout):
    folder = tiny.save(family, tmp_path)
    world, tp, flags = LAYOUTS[layout]
    reports = ranks.run(world, train, folder, flags.split(), iterations=2)
    assert_first_step_equals_hf(ranks, folder, reports, tp, random_init=True)
    assert_same_losses(reports, one_rank(ranks, folder))


MASKED = [
    *(slow("cp2", ""), ("cp2-dp2", ""), ("cp2", "--calculate-per-token-loss")),
    *(slow("cp2-dp2", "--calculate-per-token-loss"), slow("cp2-tp2-sp", ""), slow("cp2-pp2-vpp2", "")),
]


def counted(reports):
    """Labels that count, of each micro-batch of the first iteration on each last stage."""
    seen = [report for report in reports if report.losses]
    return [
        [int((labels != IGNORED).sum()) for step, _, labels in report.batches if not step and labels is not None]
        for report in seen
    ]


@pytest.mark.parametrize(("layout", "flags"), MASKED)
def test_each_label_counts_as_much_on_whatever_rank_it_is(ranks, tmp_path, layout, flags):
    """As with --eod-mask-loss, where ranks have different numbers of labels."""
    folder = tiny.save("llama", tmp_path)
    world, tp, spread = LAYOUTS[layout]
    reports = ranks.run(world, train, folder, [*spread.split(), *flags.split()], iterations=1, mask=True)
    numbers = counted(reports)
    assert 0 < min(map(min, numbers)) < max(map(max, numbers)) < 32
    assert len(set(map(tuple, numbers))) >= 2
    assert_first_step_equals_hf(ranks, folder, reports, tp, random_init=True, per_token=bool(flags))


def test_the_distributed_optimizer_shards_over_context_parallel_ranks_too(ranks, tmp_path):
    folder = tiny.save("llama", tmp_path)
    reports = ranks.run(2, train, folder, [*CP.split(), "--use-distributed-optimizer"], iterations=3)
    assert_same_losses(reports, one_rank(ranks, folder, iterations=3))


# Sinks; latent attention; experts; chunks of attention; recurrences and convolutions, whole in regions; attention
# code of its own.
OTHERS = ("gpt_oss", "deepseek_v3", "mamba", "lfm2", "falcon")


@pytest.mark.parametrize(
    ("model_type", "layout"),
    [
        slow("gpt_oss", "cp2"),  # test_layer_kinds.py has it at the level that is the default
        *((one, "cp2") for one in (*OTHERS[1:], "llama4_text")),
        *(slow(one, "cp2-tp2-sp") for one in OTHERS),
    ],
)
def test_other_architectures_equal_hf(ranks, tmp_path, model_type, layout):
    folder = str(tmp_path)
    ranks.run(1, write_small_model, model_type, folder)
    world, tp, flags = LAYOUTS[layout]
    reports = ranks.run(world, train, folder, flags.split(), iterations=1, random_init=False)
    assert_first_step_equals_hf(ranks, folder, reports, tp)


def test_experts_shared_out_over_context_parallel_ranks(ranks, tmp_path):
    ranks.run(1, write_small_model, "mixtral", str(tmp_path))
    flags = f"{CP} --expert-model-parallel-size 2".split()
    reports = ranks.run(2, train, str(tmp_path), flags, iterations=1, random_init=False)
    assert_first_step_equals_hf(ranks, str(tmp_path), reports, 1)


def test_positions_that_a_model_counts_by_itself_are_refused(ranks, tmp_path):
    """Bloom's biases go by positions that it counts, over all of its layers."""
    ranks.run(1, write_small_model, "bloom", str(tmp_path))
    with pytest.raises(RankError, match=r"context parallelism: it needs the whole sequence \(.*\), and no module"):
        ranks.run(2, train, str(tmp_path), CP.split(), iterations=1)


@pytest.mark.parametrize("layout", ["cp2", slow("cp2-pp2-vpp2")])
def test_rotary_frequencies_that_go_by_the_longest_position(ranks, tmp_path, layout):
    """One rank's longest position is 15, which takes the long factors, and the other's 11, which would not."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": 12,
    }
    folder = tiny.save("phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=12)
    world, tp, flags = LAYOUTS[layout]
    reports = ranks.run(world, train, folder, flags.split(), iterations=1)
    assert_first_step_equals_hf(ranks, folder, reports, tp, random_init=True)


def _train_with_positions_of_a_whole_sequence(folder):
    from megasched.launch import pretrain_gpt

    real = pretrain_gpt.get_batch

    def get_batch(*args):
        batch = real(*args)
        count = batch["position_ids"].shape[1]
        return {**batch, "position_ids": torch.arange(count).expand_as(batch["position_ids"])}

    pretrain_gpt.get_batch = get_batch
    try:
        train(folder, CP.split(), iterations=1)
    finally:
        pretrain_gpt.get_batch = real


def test_a_batch_that_is_split_otherwise_is_refused(ranks, tmp_path):
    folder = tiny.save("llama", tmp_path)
    with pytest.raises(RankError, match="position_ids of the batch are not those of context parallel rank"):
        ranks.run(2, _train_with_positions_of_a_whole_sequence, folder)
