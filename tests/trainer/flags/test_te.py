"""Flags that Transformer Engine carries out: without it Megatron's defaults are settled, with it they hold."""

from __future__ import annotations

import argparse
import os
from types import SimpleNamespace

import pytest
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments import add_megatron_arguments

from megasched.trainer.flags import te

VARIABLES = [f"NVTE_{name}_ATTN" for name in ("FLASH", "FUSED", "UNFUSED")]
VARIABLES += [f"NVTE_FLASH_ATTN_V{version}" for version in (2, 3, 4)]


def parsed(flags: str = "") -> argparse.Namespace:
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args = parser.parse_args(flags.split())
    args.rank = 0
    return args


@pytest.fixture
def environment(monkeypatch):
    """Without the variables; what a test sets is taken back."""
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k not in VARIABLES})
    return os.environ


def megatrons_config(args: argparse.Namespace) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, apply_rope_fusion=args.apply_rope_fusion
    )


def test_megatrons_defaults_are_settled_without_transformer_engine(capsys):
    args = parsed()
    with pytest.raises(ValueError, match="apply_rope_fusion is not available"):
        megatrons_config(args)
    te.default_args_without_te(args)
    assert args.transformer_impl == "local"
    megatrons_config(args)
    (line,) = capsys.readouterr().out.splitlines()
    assert line == (
        "megasched: Transformer Engine is not installed, so the run has --transformer-impl local --no-rope-fusion "
        "--no-persist-layer-norm --no-masked-softmax-fusion"
    )
    again = parsed(line.partition(" has ")[2])
    assert vars(again) == vars(args)  # the flags that are named say the same
    te.default_args_without_te(again)
    assert capsys.readouterr().out == ""


def test_they_stay_where_transformer_engine_is(monkeypatch, capsys):
    monkeypatch.setattr(te, "find_spec", lambda name: name)
    args, before = parsed(), parsed()
    te.default_args_without_te(args)
    assert vars(args) == vars(before)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("version", [None, 2, 4])
@pytest.mark.parametrize("backend", ["flash", "fused", "unfused"])
def test_attention_is_told_of_its_backend_as_by_megatrons_own_models(environment, backend, version):
    args = parsed(f"--attention-backend {backend}")
    args.flash_attention_version = version
    te.configure_attention_backend(args)
    ours = {name: environment.pop(name, None) for name in VARIABLES}
    LanguageModule._set_attention_backend(SimpleNamespace(config=args))
    assert ours == {name: environment.get(name) for name in VARIABLES}
    assert ours[f"NVTE_{backend.upper()}_ATTN"] == "1"


def test_an_environment_of_the_users_own_stays_where_no_backend_is_asked_for(environment):
    environment["NVTE_FUSED_ATTN"] = "0"
    te.configure_attention_backend(parsed())
    assert [name for name in VARIABLES if name in environment] == ["NVTE_FUSED_ATTN"]
    assert te.te_conflicts(parsed()) == []


def test_an_environment_that_contradicts_a_backend_is_refused(environment, monkeypatch):
    monkeypatch.setattr(te, "find_spec", lambda name: name)
    environment["NVTE_FLASH_ATTN"] = "0"
    assert te.te_conflicts(parsed("--attention-backend flash")) == [
        "--attention-backend flash: NVTE_FLASH_ATTN=0 is in the environment, which says otherwise"
    ]
    assert te.te_conflicts(parsed("--attention-backend fused")) == []


def test_a_backend_needs_transformer_engine():
    assert te.te_conflicts(parsed("--attention-backend flash")) == [f"--attention-backend flash: {te._MISSING}"]


def test_an_offloaded_optimizer_that_could_not_be_resumed_is_refused(monkeypatch):
    assert te.te_conflicts(parsed("--optimizer-cpu-offload")) == []
    for flag in ("--save", "--load"):
        args = parsed(f"--optimizer-cpu-offload {flag} there")
        assert te.te_conflicts(args) == [f"--optimizer-cpu-offload: {te._UNCOUNTED}"]
        with monkeypatch.context() as patched:
            patched.setattr(te, "find_spec", lambda name: name if name == "apex" else None)
            assert te.te_conflicts(args) == []
