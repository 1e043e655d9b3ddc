"""Layers that a definition skips by chance."""

from __future__ import annotations

import random

import numpy as np
import pytest
from transformers.models.opt.modeling_opt import OPTDecoder, OPTDecoderLayer

from megasched.analysis.find_layer_stack import find_layer_stack
from megasched.definition.build import build_definition
from megasched.errors import ScheduleError
from megasched.language.parallel_dims import ParallelDims
from megasched.trainer.session import open_session
from megasched.trainer.stages.refused_stages import refuse_stages
from megasched.trainer.unreached import refuse_unsure_overlap
from tests import tiny

BY_PYTHON = "the code around them draws Python's or numpy's random numbers, and each stage would draw others"
WHY = "the code around them asks for a number that it draws, and each stage would draw another"


def structure(**changes):
    return find_layer_stack(build_definition(tiny.config("opt", **changes)))


def test_layers_that_may_be_skipped_are_seen():
    found = structure(layerdrop=0.5)
    assert (found.by_chance, found.uncuttable) == (True, WHY)


@pytest.mark.parametrize(
    "changes", [{"layerdrop": 0.0}, {"dropout": 0.5}, {"dropout": 0.5, "attention_dropout": 0.5}]
)
def test_what_is_dropped_elsewhere_is_no_skip(changes):
    found = structure(**changes)
    assert (found.by_chance, found.uncuttable) == (False, "")


class Skipping(OPTDecoder):
    """Draws for each layer whether it runs, from another generator than torch's."""

    draw = staticmethod(random.random)

    def forward(self, *args, **kwargs):
        for layer in self.layers:
            layer.skipped = self.draw() < 0.0
        return super().forward(*args, **kwargs)


class SkippingByNumpy(Skipping):
    draw = staticmethod(np.random.random)


class DrawingInside(OPTDecoderLayer):
    """Draws on the stage that it is on."""

    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(
            hidden_states * (1 + 0 * random.random() + 0 * float(np.random.random())), *args, **kwargs
        )


@pytest.mark.parametrize(("kind", "refused"), [(Skipping, True), (SkippingByNumpy, True), (DrawingInside, False)])
def test_draws_of_python_and_numpy_are_seen(kind, refused):
    model = build_definition(tiny.config("opt"))
    changed = model.model.decoder.layers if kind is DrawingInside else [model.model.decoder]
    for module in changed:
        module.__class__ = kind
    found = find_layer_stack(model)
    assert found.by_chance == refused
    assert found.uncuttable == (BY_PYTHON if refused else "")


def test_pipelines_and_overlap_are_refused(tmp_path):
    folder = tiny.save("opt", tmp_path, layerdrop=0.5)
    session = open_session("auto", folder, ParallelDims(pipeline_model_parallel_size=2))
    with pytest.raises(ScheduleError, match=WHY):
        _ = session.plan
    session = open_session("auto", folder, ParallelDims())
    with pytest.raises(ScheduleError, match="skipped by chance"):
        refuse_unsure_overlap(session.reach, session.plan.structure, overlap_grad_reduce=True)
    refuse_stages(
        open_session("auto", tiny.save("opt", tmp_path / "all"), ParallelDims()).plan, session.definition.config
    )
