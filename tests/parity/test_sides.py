"""Stages of models whose layers read more than the hidden state, or that are built otherwise than most."""

import pytest
import torch

from megasched.definition.small_models.shrink import TOKENS, VOCABULARY
from megasched.definition.small_models.small_models import write_small_model
from megasched.verify.parity import LAYOUTS, check_layout
from megasched.verify.ranks.pool import RankError
from megasched.verify.trainer_run import losses, train
from tests.parity.cases import case
from tests.parity.steps import SAVE, assert_equal, assert_equal_by_rounding, assert_same_run, run

# Model type -> layout, and what it is here for.
CASES = {
    "gemma4_text": ("tp2-pp2", "keys and values in a mapping, embeddings for each layer; cut over TP"),
    "glm_moe_dsa": ("pp2-vpp2", "indices that a layer hands on"),
    "zamba": ("pp2-vpp2", "the embeddings again, a block that several stages share"),
    "deepseek_v4": ("pp2", "token ids, a hidden state of four dimensions"),
    "xlm": ("pp2-vpp2", "modules between the layers"),
    "xlnet": ("pp2", "a hidden state [s, b, h]"),
    "mllama": ("pp2-vpp2", "a layer that is not called"),
}


# On some kinds of processor the norm of the first one's queries, and a scale of the second, are 1.0e-5 and 1.3e-5
# off: as far from float64 as plain HF is in one draw of its roundings or another.
ROUNDED = ("gemma4_text", "deepseek_v4")
# The matrix has these at the same layouts.
IN_THE_MATRIX = ("glm_moe_dsa", "deepseek_v4", "xlm", "xlnet")


@pytest.mark.parametrize("model_type", [case(one, fast=one not in IN_THE_MATRIX) for one in CASES])
def test_a_step_equals_the_unscheduled_model(ranks, tmp_path, model_type):
    (folder,) = ranks.run(1, write_small_model, model_type, str(tmp_path))
    outcome = check_layout(ranks, folder, CASES[model_type][0])
    (assert_equal_by_rounding if model_type in ROUNDED else assert_equal)(outcome)


def test_reversible_layers_are_refused(ranks, tmp_path):
    (folder,) = ranks.run(1, write_small_model, "reformer", str(tmp_path))
    outcome = check_layout(ranks, folder, "pp2")
    assert outcome.verdict == "refused"
    assert "the model computes their gradients by a function of its own" in outcome.why
    assert check_layout(ranks, folder, "one").verdict == "equal"


PP2 = ["--pipeline-model-parallel-size", "2"]


def test_a_parameter_of_several_stages_is_trained_as_one(ranks, tmp_path):
    """Zamba's shared block: several steps at PP2, of the distributed optimizer, as on one rank."""
    (folder,) = ranks.run(1, write_small_model, "zamba", str(tmp_path / "model"))
    flags = ["--vocab-size", str(VOCABULARY), "--use-distributed-optimizer"]
    options = {"iterations": 4, "random_init": False, "tokens": TOKENS}
    whole = ranks.run(1, train, folder, flags, **options)
    staged = ranks.run(2, train, folder, [*PP2, *flags], **options)
    assert_same_run(staged, whole, atol=1e-6)


def test_a_parameter_of_several_stages_is_resumed_as_one(ranks, tmp_path):
    """Two copies of the shared block and of the tied embeddings, which Megatron gives a bucket of their own."""
    (folder,) = ranks.run(1, write_small_model, "zamba", str(tmp_path / "model"))
    whole = run(ranks, folder, LAYOUTS["one"], iterations=4)
    saving = ["--save", str(tmp_path / "kept"), "--save-interval", "2"]
    run(ranks, folder, LAYOUTS["pp2"], *SAVE, *saving, iterations=2)
    resumed = run(ranks, folder, LAYOUTS["pp2"], *SAVE, "--load", str(tmp_path / "kept"), iterations=4)
    assert_same_run(resumed, whole, skip=2)


def test_a_hidden_state_wider_than_the_configs_crosses_alone(ranks, tmp_path):
    """Qwen4's residual streams: before the last layer nothing else crosses."""
    (folder,) = ranks.run(1, write_small_model, "qwen4_exp_text", str(tmp_path / "model"))
    options = {"iterations": 2, "random_init": False, "tokens": TOKENS}
    flags = ["--vocab-size", str(VOCABULARY)]
    whole = ranks.run(1, train, folder, flags, **options)
    staged = ranks.run(2, train, folder, [*PP2, "--decoder-first-pipeline-num-layers", "3", *flags], **options)
    torch.testing.assert_close(losses(staged), losses(whole), rtol=2e-6, atol=0)
    torch.testing.assert_close(staged[0].grad_norms, whole[0].grad_norms, rtol=1e-5, atol=0)


def test_shared_parameters_need_their_gradients_before_they_are_reduced(ranks, tmp_path):
    (folder,) = ranks.run(1, write_small_model, "zamba", str(tmp_path))
    flags = [*PP2, "--overlap-grad-reduce", "--vocab-size", str(VOCABULARY)]
    with pytest.raises(RankError, match="leave out --overlap-grad-reduce"):
        ranks.run(2, train, folder, flags, iterations=1)
