"""A session in another layout is the one that would have been opened for it."""

from __future__ import annotations

import pytest

from megasched import patches
from megasched.analysis import analysis_cache
from megasched.errors import ScheduleError
from megasched.language.parallel_dims import ParallelDims
from megasched.trainer.session import open_session
from tests import tiny

TP2 = ParallelDims(tensor_model_parallel_size=2, sequence_parallel=True)
TP4 = ParallelDims(tensor_model_parallel_size=4, sequence_parallel=True)
CP2 = ParallelDims(context_parallel_size=2)
CP4_TP2 = ParallelDims(tensor_model_parallel_size=2, sequence_parallel=True, context_parallel_size=4)


@pytest.fixture(autouse=True)
def no_patch_stays():
    yield
    patches.undo("zigzag_positions")


def told(plan):
    return (
        plan.layout,
        plan.cuts,
        plan.placements,
        plan.tp_facts,
        plan.cp_facts,
        plan.fused_columns,
        plan.replicated_heads,
    )


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("layouts", [(ParallelDims(), TP2, TP4), (CP2, CP4_TP2)], ids=["whole", "split"])
def test_the_plan_is_that_of_a_session_of_its_own(tmp_path, family, layouts):
    folder = tiny.save(family, tmp_path)
    first = open_session("auto", folder, layouts[0])
    assert first.plan is not None
    for layout in layouts[1:]:
        shared, own = first.with_layout(layout), open_session("auto", folder, layout)
        assert told(shared.plan) == told(own.plan)
        assert shared.vocab_multiple == own.vocab_multiple
        assert shared.definition is first.definition


def test_a_definition_is_followed_once_for_layouts_that_cut_it_alike(tmp_path, monkeypatch):
    runs = []
    real = analysis_cache.propagate
    monkeypatch.setattr(
        analysis_cache, "propagate", lambda *args, **asked: runs.append(asked) or real(*args, **asked)
    )
    first = open_session("auto", tiny.save("llama", tmp_path, num_key_value_heads=4), TP2)
    assert first.plan.tp_facts is first.with_layout(TP4).plan.tp_facts
    assert len(runs) == 1
    whole_sequence = ParallelDims(tensor_model_parallel_size=2)
    assert first.with_layout(whole_sequence).plan.tp_facts is not first.plan.tp_facts
    assert len(runs) == 2


def test_replacements_are_those_of_each_layout(tmp_path):
    schedule = tmp_path / "mysched.py"
    schedule.write_text(
        "from torch import nn\n"
        "def schedule(sch, layout):\n"
        "    if layout.tp == 4:\n"
        "        for layer in sch['model.layers.*']:\n"
        "            layer['mlp.act_fn'].replace(nn.ReLU())\n"
    )
    first = open_session(str(schedule), tiny.save("llama", tmp_path / "llama"), TP2)
    other = first.with_layout(TP4)
    assert first.replaced is first.definition
    assert other.replaced is not first.definition
    assert type(other.replaced.model.layers[0].mlp.act_fn).__name__ == "ReLU"
    assert type(first.definition.model.layers[0].mlp.act_fn).__name__ != "ReLU"
    assert other.plan.structure is not None


def test_sequences_are_split_in_both_layouts_or_in_none(tmp_path):
    first = open_session("auto", tiny.save("llama", tmp_path), ParallelDims())
    with pytest.raises(ValueError, match="splits sequences"):
        first.with_layout(CP2)


def test_a_layout_that_can_not_be_is_refused(tmp_path):
    first = open_session("auto", tiny.save("llama", tmp_path), ParallelDims())
    with pytest.raises(ScheduleError, match="does not divide"):
        assert first.with_layout(ParallelDims(tensor_model_parallel_size=3)).plan
