"""What ``show`` says of the pipeline stages."""

import pytest

from megasched.cli.show.report import inspect_schedule
from megasched.definition.small_models.small_models import small_config
from megasched.errors import ScheduleError
from megasched.language.parallel_dims import ParallelDims

# Of the Llama in conftest.py, on one of two TP ranks: attention (q 32x32, k and v 8x32, o 32x32) and MLP (three
# 64x32) in halves, two norms whole; half of a padded vocabulary of 512.
LAYER = (32 * 32 * 2 + 8 * 32 * 2 + 3 * 64 * 32) // 2 + 2 * 32
VOCABULARY = 512 // 2 * 32


def test_stages_of_pp_2_vp_2(inspect):
    stages = inspect(tp=2, pp=2, vp=2).stages
    assert [(s.stage, s.pp_rank, s.vp_stage, s.start, s.stop) for s in stages] == [
        (0, 0, 0, 0, 1),
        (1, 1, 0, 1, 2),
        (2, 0, 1, 2, 3),
        (3, 1, 1, 3, 4),
    ]
    assert [s.parameters for s in stages] == [LAYER + VOCABULARY, LAYER, LAYER, LAYER + VOCABULARY + 32]
    assert [s.holds for s in stages] == [("model.embed_tokens",), (), (), ("model.norm", "lm_head")]


def test_shares_of_flops(inspect):
    stages = inspect(pp=2, sequence_length=64).stages
    layer = 2 * (32 * 32 * 2 + 8 * 32 * 2 + 3 * 64 * 32) + 2 * 65 * 8 * 4
    head = 2 * 300 * 32
    assert [(s.start, s.stop) for s in stages] == [(0, 2), (2, 4)]
    total = 4 * layer + head
    assert [s.flops_share for s in stages] == pytest.approx([2 * layer / total, (2 * layer + head) / total])


def test_cuts_of_the_schedule(inspect):
    stages = inspect('sch["model.layers.2"].cut_pipeline_stage()', pp=2).stages
    assert [(s.start, s.stop) for s in stages] == [(0, 3), (3, 4)]
    assert stages[0].cut_at.endswith("mysched.py:11")
    assert stages[1].cut_at == ""


def test_one_stage_without_a_pipeline(inspect):
    report = inspect()
    (stage,) = report.stages
    assert (stage.start, stage.stop, stage.flops_share) == (0, 4, 1.0)
    # No TP and a vocabulary of 300 padded to 384, in embedding and head.
    assert stage.parameters == report.parameters + 2 * 84 * 32


def test_a_tied_weight_counts_on_both_its_stages(inspect):
    first, last = inspect(tp=2, pp=2, overrides=["tie_word_embeddings=true"]).stages
    assert first.parameters == 2 * LAYER + VOCABULARY
    assert last.parameters == 2 * LAYER + VOCABULARY + 32
    (whole,) = inspect(tp=2, overrides=["tie_word_embeddings=true"]).stages
    assert whole.parameters == 4 * LAYER + VOCABULARY + 32


def test_where_each_module_lives(inspect):
    found = {module.path: module.stages for module in inspect(tp=2, pp=2, vp=2).modules}
    assert found["model.embed_tokens"] == (0,)
    assert found["model.norm"] == found["lm_head"] == (3,)
    assert [found[f"model.layers.{layer}.mlp.up_proj"] for layer in range(4)] == [(0,), (1,), (2,), (3,)]
    assert found["model"] == found["model.layers"] == (0, 1, 2, 3)


def test_bytes_are_of_16_bits(inspect):
    for stage in inspect(tp=2, pp=2).stages:
        assert stage.parameter_bytes == 2 * stage.parameters


def test_too_many_stages(inspect):
    with pytest.raises(ScheduleError, match="8 stages for 4 layers"):
        inspect(pp=4, vp=2)


def test_no_more_tokens_than_there_are_positions(tmp_path):
    """BERT has a table of positions, which is shorter than the default of ``--seq-length``."""
    folder = str(tmp_path)
    small_config("bert").save_pretrained(folder)
    report = inspect_schedule("auto", folder, ParallelDims(), objective="masked_lm")
    assert report.sequence_length == small_config("bert").max_position_embeddings < 4096
    with pytest.raises(ScheduleError, match=r"FLOPs can't be counted at 4096 tokens[^\0]*--seq-length"):
        inspect_schedule("auto", folder, ParallelDims(), objective="masked_lm", sequence_length=4096)
