"""Layouts of a planner as points to begin with."""

import json

import pytest

from megasched.errors import ConfigError
from megasched.tuner.space import Space
from megasched.tuner.warm_start import read_warm_start


@pytest.fixture
def space():
    space = Space()
    tp = space.choice("tp", [1, 2, 4])
    pp = space.choice("pp", [1, 2])
    space.choice("vp", [2, 4], when=pp > 1)
    space.choice("micro_batch_size", [1, 2])
    space.where(tp * pp <= 4)
    return space


def places(space, tmp_path, *layouts):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"layouts": [{"flags": flags} for flags in layouts]}))
    return [space.points[place] for place in read_warm_start(path, space)]


def test_flags_by_megatrons_names_become_points_in_their_order(space, tmp_path):
    assert places(
        space,
        tmp_path,
        {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 1, "micro_batch_size": 2, "bf16": True},
        {"tensor_model_parallel_size": 8},  # not in the space
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        {"tp": 4, "pp": 1, "micro_batch_size": 2},  # the first again
    ) == [{"tp": 4, "pp": 1, "micro_batch_size": 2}, {"tp": 2, "pp": 2, "vp": 2, "micro_batch_size": 1}]


def test_one_chunk_a_rank_is_no_interleaving(space, tmp_path):
    flags = {"pipeline_model_parallel_size": 1, "num_virtual_stages_per_pipeline_rank": 1}
    assert places(space, tmp_path, flags)[0] == {"tp": 1, "pp": 1, "micro_batch_size": 1}


@pytest.mark.parametrize("absent", [False, None])
def test_a_flag_that_is_not_there(tmp_path, absent):
    """A plan says so of sequence parallelism at TP 1, where a space need not have a value."""
    space = Space()
    tp = space.choice("tp", [2, 1])
    space.choice("sp", [True, absent], when=tp > 1)
    said = [{"tensor_model_parallel_size": tp, "sequence_parallel": False} for tp in (1, 2)]
    assert places(space, tmp_path, *said) == [{"tp": 1}, {"tp": 2, "sp": absent}]


def test_files_without_a_usable_layout_are_refused(space, tmp_path):
    with pytest.raises(ConfigError, match=r"no layout of it is a point.*\"tp\": 16.*tensor_model_parallel_size"):
        places(space, tmp_path, {"tp": 16})
    path = tmp_path / "plan.json"
    for text in ("[]", "{", '{"layouts": [1]}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="expected JSON of the form"):
            read_warm_start(path, space)
    with pytest.raises(ConfigError, match="No such file"):
        read_warm_start(tmp_path / "none.json", space)
