"""What one plan found out another takes over, as long as it rests on the same answers."""

from __future__ import annotations

import pytest

from megasched import patches
from megasched.analysis import analysis_cache
from megasched.analysis.analysis_cache import AnalysisCache
from megasched.analysis.find_layer_stack import find_layer_stack
from megasched.analysis.trials.ways import NO_OTHERS
from megasched.layers import attention
from tests.lowering.models import tiny_model


@pytest.fixture
def llama():
    patches.apply("zigzag_positions")
    model = tiny_model("llama")
    attention.enable(model)
    yield model, find_layer_stack(model)
    patches.undo("zigzag_positions")


def test_positions_are_counted_once(llama, monkeypatch):
    asked = []
    monkeypatch.setattr(analysis_cache, "takes_counted_positions", lambda model: asked.append(model) or True)
    runs = AnalysisCache()
    first, again, other = (runs.plan_sequence(*llama, size, lambda path: "") for size in (2, 2, 4))
    assert again is first
    assert other is not first
    assert len(asked) == 1


def test_another_answer_makes_another_run(llama, monkeypatch):
    made = []

    def plan_sequence(model, structure, size, refuse_region, positions_count, ways):
        made.append(refuse_region("model.layers.0.mlp"))
        return made[-1]

    monkeypatch.setattr(analysis_cache, "plan_sequence", plan_sequence)
    runs = AnalysisCache()
    assert runs.plan_sequence(*llama, 2, lambda path: "") == ""
    assert runs.plan_sequence(*llama, 2, lambda path: "no") == "no"
    assert runs.plan_sequence(*llama, 2, lambda path: "no" if "mlp" in path else "") == "no"
    assert made == ["", "no"]


def test_one_run_shows_that_long_sequences_go_no_other_way(llama, monkeypatch):
    made = []
    record_tape = analysis_cache.record_tape
    monkeypatch.setattr(
        analysis_cache, "record_tape", lambda *args, **more: made.append(1) or record_tape(*args, **more)
    )
    for more in ("find_ways", "numbers_at"):
        monkeypatch.setattr(analysis_cache, more, None)
    model, structure = llama
    runs = AnalysisCache()
    assert runs.ways(model, structure.trial_inputs(), structure) == NO_OTHERS
    assert runs.goes_by_length(model, structure, 2, lambda path: False, places=False) is None
    assert len(made) == 1


def test_more_runs_are_made_where_long_sequences_go_another_way(llama):
    model, structure = llama
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) if x.shape[1] < 40 else forward(x) / x.shape[1]
    runs = AnalysisCache(length=64)
    assert [way.length for way in runs.ways(model, structure.trial_inputs(), structure).others] == [64]
    path, _ = runs.goes_by_length(model, structure, 2, lambda path: False, places=False)
    assert path == "model.layers.1.mlp"
