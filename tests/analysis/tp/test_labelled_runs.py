"""How often a tape is read to find out how its tensors are cut, and what becomes of those made of token ids."""

from __future__ import annotations

import pytest

from megasched.analysis.tp import propagate
from megasched.definition.small_models.small_models import write_small_model
from megasched.errors import ScheduleError
from megasched.language.parallel_dims import ParallelDims
from megasched.trainer.session import open_session
from tests import tiny

SPLIT = ParallelDims(tensor_model_parallel_size=2, sequence_parallel=True)
TABLE = "model.layers.0.ple.ple_embedding.ngram_embedding"


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "deepseek_v2"])
def test_more_layers_want_no_more_readings(tmp_path, monkeypatch, family):
    """Regions of all layers are found together: Qwen3-Next has 84 in 48 layers."""
    runs = []

    class Counted(propagate.RecordedCalls):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            runs[-1] += 1

    monkeypatch.setattr(propagate, "RecordedCalls", Counted)
    for layers in (4, 8):
        runs.append(0)
        folder = tiny.save(family, tmp_path / str(layers), num_hidden_layers=layers)
        plan = open_session("auto", folder, SPLIT).plan
        assert plan.structure.count == layers
    assert runs[0] == runs[1]


@pytest.fixture(scope="module")
def with_tables(tmp_path_factory):
    return write_small_model("qwen4_exp_text", str(tmp_path_factory.mktemp("qwen4")))


def test_what_is_looked_up_by_token_ids_and_rows_of_whole_features_on_split_tokens(with_tables):
    """A layer's own table of n-grams is read where the whole hidden state has been gathered, and leaves split."""
    plan = open_session("auto", with_tables, SPLIT).plan
    assert {"model.layers.0.ple", "model.layers.2.ple"} <= plan.tp_facts.needed_regions
    row = "model.layers.0.mlp_hyper_connection.input_mix_weight_down"
    for path in (TABLE, "model.layers.0.ple.key_proj", "model.layers.0.ple.norm_key", row):
        assert plan.placements[f"{path}.weight"].tp_gradient == "partial", path
    assert "has its part of the tokens" in plan.left_whole[row].reason
    assert plan.cuts["model.hyper_connection_mixer.input_mix_weight_down"] == "row"  # after the layers


def test_a_table_of_token_ids_that_is_cut_inside_of_a_region_is_refused(tmp_path, with_tables):
    """Each rank's sum of the looked-up rows would have the gradient of its own part of the sequence alone."""
    schedule = tmp_path / "cut.py"
    schedule.write_text(f"def schedule(sch, layout):\n    sch[{TABLE!r}].shard('weight', axis=0)\n")
    with pytest.raises(ScheduleError, match=r"model\.layers\.0\.ple"):
        _ = open_session(str(schedule), with_tables, SPLIT).plan
