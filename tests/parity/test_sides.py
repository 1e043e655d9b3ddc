"""Stages of models whose layers read more than the hidden state, or that are built otherwise than most."""

import pytest

from megasched.verify.parity import TOLERANCE, check_layout
from megasched.verify.small_models import write_small_model

# Model type -> layout, and what it is here for.
CASES = {
    "gemma4_text": ("tp2-pp2", "keys and values in a mapping, embeddings for each layer; cut over TP"),
    "glm_moe_dsa": ("pp2-vpp2", "indices that a layer hands on"),
    "zamba": ("pp2-vpp2", "the embeddings again, a block that several stages share"),
    "deepseek_v4": ("pp2", "token ids, a hidden state of four dimensions"),
    "xlm": ("pp2-vpp2", "modules between the layers"),
    "xlnet": ("pp2", "a hidden state [s, b, h]"),
    "mllama": ("pp2-vpp2", "a layer that is not called"),
    "prophetnet": ("pp2", "a tuple before the layers, weights read by other modules"),
}


@pytest.mark.parametrize("model_type", CASES)
def test_a_step_equals_the_unscheduled_model(ranks, tmp_path, model_type):
    (folder,) = ranks.run(1, write_small_model, model_type, str(tmp_path))
    outcome = check_layout(ranks, folder, CASES[model_type][0])
    assert (outcome.verdict, outcome.why) == ("equal", "")
    assert max(outcome.errors.values()) <= TOLERANCE


def test_reversible_layers_are_refused(ranks, tmp_path):
    (folder,) = ranks.run(1, write_small_model, "reformer", str(tmp_path))
    outcome = check_layout(ranks, folder, "pp2")
    assert outcome.verdict == "refused"
    assert "the model computes their gradients by a function of its own" in outcome.why
    assert check_layout(ranks, folder, "one").verdict == "equal"
