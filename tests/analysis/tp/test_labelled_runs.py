"""How often a tape is read to find out how its tensors are cut."""

from __future__ import annotations

import pytest

from megasched.analysis.tp import propagate
from megasched.language.parallel_dims import ParallelDims
from megasched.trainer.session import open_session
from tests import tiny


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
        plan = open_session(
            "auto", folder, ParallelDims(tensor_model_parallel_size=2, sequence_parallel=True)
        ).plan
        assert plan.structure.count == layers
    assert runs[0] == runs[1]
