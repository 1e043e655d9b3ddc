"""The bundled entry script: where it is, what it refuses, its loss and its batches on one rank."""

from argparse import Namespace

import pytest
import torch

from megasched.errors import ConfigError
from megasched.launch import BUNDLED_SCRIPTS, bundled_script


@pytest.fixture(scope="module")
def script():
    import megasched.launch.pretrain_gpt as module

    return module


def test_only_entry_scripts_are_found_and_only_by_bare_name():
    for name in BUNDLED_SCRIPTS:
        path = bundled_script(name)
        assert path.is_file()
        assert path.is_absolute()
    assert bundled_script("checks.py") is None
    assert bundled_script("./pretrain_gpt.py") is None
    assert bundled_script("pretrain_vlm.py") is None


def test_every_flag_it_refuses_is_named_at_once(script):
    args = Namespace(**dict.fromkeys(script.UNSUPPORTED, None) | {"fim_data": True, "mtp_num_layers": 2})
    with pytest.raises(ConfigError) as caught:
        script.refuse_unsupported(args)
    assert "--fim-data:" in str(caught.value)
    assert "--mtp-num-layers:" in str(caught.value)
    assert "--hybrid-context-parallel" not in str(caught.value)


def test_the_flags_it_refuses_exist_in_megatron(script):
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    known = {action.dest for action in add_megatron_arguments(argparse.ArgumentParser())._actions}
    assert set(script.UNSUPPORTED) <= known


def test_megatrons_defaults_are_not_refused(script):
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    script.refuse_unsupported(add_megatron_arguments(argparse.ArgumentParser()).parse_args([]))


def test_the_loss_is_a_masked_sum_and_its_report_both_parts(script, monkeypatch):
    monkeypatch.setattr(
        script,
        "get_args",
        lambda: Namespace(check_for_nan_in_loss_and_grad=False, check_for_spiky_loss=False),
    )
    monkeypatch.setattr(script, "get_rerun_state_machine", lambda: None)
    losses = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.bfloat16, requires_grad=True)
    loss, tokens, report = script.loss_func(torch.tensor([[1.0, 0.0, 1.0]]), losses)
    assert loss.item() == 5.0
    assert (tokens.item(), tokens.dtype) == (2, torch.int32)
    assert report["lm loss"].tolist() == [5.0, 2.0]
    assert not report["lm loss"].requires_grad
    loss.backward()
    assert losses.grad.tolist() == [[1.0, 0.0, 1.0]]


def test_nan_infinity_and_spikes_are_each_put_to_the_rerun_machine(script, monkeypatch):
    asked = []

    class Machine:
        def is_unexpectedly_large(self, result, threshold, context):
            return result.item() > threshold

        def validate_result(self, result, rejection_func, message, tolerance, fatal):
            asked.append((bool(rejection_func(result)), fatal))

    monkeypatch.setattr(script, "get_rerun_state_machine", Machine)
    args = Namespace(check_for_nan_in_loss_and_grad=True, check_for_spiky_loss=True)
    for value in (torch.nan, torch.inf, 1.0):
        script.check_loss(torch.tensor(value), args)
    assert asked == [
        *((True, True), (False, True), (False, False)),
        *((False, True), (True, True), (True, False)),
        *((False, True), (False, True), (False, False)),
    ]


@pytest.mark.parametrize(
    ("pp_ranks", "untied", "expected"),
    [([3], False, [3]), ([0, 4, 8], False, [0, 8]), ([0, 4, 8], True, [0])],
)
def test_ranks_that_hold_the_word_embedding(script, monkeypatch, pp_ranks, untied, expected):
    monkeypatch.setattr(script, "get_args", lambda: Namespace(untie_embeddings_and_output_weights=untied))
    assert script.get_embedding_ranks(pp_ranks) == expected
