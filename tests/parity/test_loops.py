"""Models that run their layers in loops: every kind of parallelism but stages and split sequences."""

import pytest

from megasched.definition.small_models.small_models import small_config, write_small_model
from megasched.verify.parity import LAYOUTS, CheckedLayout, check_layout
from megasched.verify.ranks.pool import RankError
from tests.parity.cases import slow
from tests.parity.steps import ADAM, assert_equal, assert_same_run, run

# Model type -> how it runs.
CASES = {
    "hrm_text": "two lists of layers in turn",
    "dory": "some layers of a list; a head with a forward of its own",
    "inkling2_loop_text": "some layers of a list, with other arguments the second time; experts",
}
LOOPS = [("hrm_text", "tp2"), ("dory", "cp2-tp2"), slow("dory", "tp2"), ("inkling2_loop_text", "ep2")]
LOOPS += [slow("inkling2_loop_text", "tp2")]


@pytest.fixture(scope="module")
def folders(ranks, tmp_path_factory):
    """Model type -> folder of a small model."""
    return {
        model_type: ranks.run(1, write_small_model, model_type, str(tmp_path_factory.mktemp(model_type)))[0]
        for model_type in CASES
    }


def test_the_small_models_have_loops():
    dory = small_config("dory")
    assert (dory.n_recurrent_layers, dory.n_recurrent_loops) == (2, 2)
    looped = small_config("inkling2_loop_text")
    assert looped.loop_layer_index_start < looped.loop_layer_index_end < looped.num_hidden_layers
    assert looped.loop_num_passes > 1


@pytest.mark.parametrize(("model_type", "layout"), LOOPS)
def test_a_step_equals_the_unscheduled_model(ranks, folders, model_type, layout):
    outcome = check_layout(ranks, folders[model_type], layout)
    assert_equal(outcome)


RECOMPUTE = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]


def test_several_steps_recomputed_and_reduced_beside_the_backward_pass_are_as_by_one_process(ranks, folders):
    """A layer's gradients are complete after its last call; each call is computed again by itself."""
    whole = run(ranks, folders["hrm_text"], LAYOUTS["one"], iterations=3)
    wide = CheckedLayout(4, 2, LAYOUTS["tp2"].flags)
    parts = run(ranks, folders["hrm_text"], wide, *ADAM, *RECOMPUTE, iterations=3)
    assert_same_run(parts, whole, tp=2)


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        ("pp2", "can't be cut into pipeline stages: they are called more than once"),
        ("tp2-sp", "splits the hidden state at the first call"),
    ],
)
def test_stages_and_split_sequences_are_refused(ranks, folders, layout, why):
    with pytest.raises(RankError, match=why):
        run(ranks, folders["dory"], LAYOUTS[layout])
