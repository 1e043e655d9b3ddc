"""Attention whose biases come whole is cut over TP, and every number stays that of the unscheduled model."""

from __future__ import annotations

import pytest

from megasched.definition.small_models.small_models import small_config, write_model
from megasched.layers.regions import slices_of
from megasched.trainer.session import open_session
from megasched.verify.parity import LAYOUTS, check_layout
from tests.parity.cases import spread
from tests.parity.steps import assert_equal

# Slopes of ALiBi follow another rule where the heads are no power of two.
CASES = {
    "bloom": {},
    "bloom of 12 heads": {"hidden_size": 96, "n_head": 12},
    # Its attention is handed one tensor as what it reads and what it adds to.
    "bloom with residuals of norms": {"apply_residual_connection_post_layernorm": True},
    "mpt": {},
    "mpt of 12 heads": {"d_model": 96, "n_heads": 12},
    "falcon with ALiBi": {"alibi": True, "multi_query": False},
    "falcon with ALiBi and groups": {"alibi": True, "new_decoder_architecture": True, "num_kv_heads": 2},
}
ARGUMENT = {"bloom": "alibi", "mpt": "position_bias", "falcon": "attention_mask"}


@pytest.mark.parametrize(("case", "layout"), spread(CASES, ["tp2-sp", "tp2-pp2"]))
def test_a_step_equals_the_unscheduled_model(ranks, tmp_path, case, layout):
    model_type = case.partition(" ")[0]
    config = small_config(model_type)
    vars(config).update(CASES[case])
    ranks.run(1, write_model, config, str(tmp_path))
    ranks.run(1, check_cut, str(tmp_path), ARGUMENT[model_type], layout)
    assert_equal(check_layout(ranks, str(tmp_path), layout))


def check_cut(folder: str, argument: str, layout: str) -> None:
    """In a rank: every linear inside the layers is cut, and attention gets its part of the argument."""
    from megasched.language.parallel_dims import ParallelDims

    sequence_parallel = "--sequence-parallel" in LAYOUTS[layout].flags
    session = open_session(
        "auto", folder, ParallelDims(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    )
    plan = session.plan
    matrices = [
        placement
        for placement in plan.placements.values()
        if len(placement.shape) == 2 and plan.structure.index_of(placement.name) is not None
    ]
    assert len(matrices) == 4 * 4
    assert all(placement.sharded for placement in matrices)
    modules = {argument.path for argument in plan.tp_facts.parts}
    assert len(modules) == 4
    assert all(slices_of(plan, path).keys() == {argument} for path in modules)
