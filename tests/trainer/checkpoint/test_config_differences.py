"""The config of a run against the one that its checkpoint keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megasched.definition.build import load_config
from megasched.errors import CheckpointError
from megasched.trainer.checkpoint.config_differences import (
    config_differences,
    refuse_another_config,
    tell_of_another_config,
)
from megasched.weights.hf.files import write_hf_files
from megasched.weights.torch_dist.reader import HF_FILES
from tests import tiny


def kept(folder: Path, config: Any) -> Path:
    """A checkpoint with this config, without its weights."""
    (folder / HF_FILES).mkdir(parents=True)
    write_hf_files(folder / HF_FILES, config, folder)
    return folder


def said(checkpoint: Path, config: Any) -> list[str]:
    return [str(difference) for difference in config_differences(checkpoint, config)]


@pytest.mark.parametrize(
    ("changes", "override"),
    [
        ({"rms_norm_eps": 0.01}, "rms_norm_eps=0.01"),
        ({"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}, "rope_parameters.rope_theta=5.0"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}},
            '\'rope_parameters={"factor": 2.0, "rope_theta": 10000.0, "rope_type": "linear"}\'',
        ),
    ],
)
def test_the_override_that_is_told_mends_it(tmp_path, changes, override):
    model = tiny.save("llama", tmp_path / "model")
    checkpoint = kept(tmp_path / "ckpt", tiny.config("llama", **changes))
    (line,) = said(checkpoint, load_config(model))
    assert line.endswith(f"in this run: --hf-override {override}")
    assert said(checkpoint, load_config(model, [override.strip("'")])) == []


def test_all_fields_are_told_with_both_values(tmp_path):
    checkpoint = kept(tmp_path / "ckpt", tiny.config("llama", rms_norm_eps=0.01, hidden_act="gelu"))
    with pytest.raises(CheckpointError) as refused:
        refuse_another_config(checkpoint, tiny.config("llama"))
    lines = str(refused.value).splitlines()
    assert lines[0] == f"{checkpoint}: it was trained with another config than this run's (2):"
    assert lines[1].startswith('    hidden_act: "gelu" in the checkpoint, "silu" in this run: --hf-override ')
    assert lines[2].startswith("    rms_norm_eps: 0.01 in the checkpoint, 1e-06 in this run: --hf-override ")


def test_fields_of_nested_configs(tmp_path):
    from transformers import Gemma3Config

    def config(base: float) -> Gemma3Config:
        return Gemma3Config(text_config={"query_pre_attn_scalar": base}, vision_config={"num_hidden_layers": 1})

    (line,) = said(kept(tmp_path / "ckpt", config(100)), config(256))
    name = "text_config.query_pre_attn_scalar"
    assert line == f"{name}: 100 in the checkpoint, 256 in this run: --hf-override {name}=100"


@pytest.mark.parametrize(
    "changes",
    [
        {"use_cache": False},
        {"dtype": "bfloat16"},
        {"initializer_range": 0.5},
        {"output_hidden_states": True},
        {"num_labels": 7},
        {"max_position_embeddings": 64},  # of rotary positions whose frequencies do not follow from it
        {"attn_implementation": "eager"},
    ],
)
def test_what_says_nothing_of_numbers_is_not_compared(tmp_path, changes):
    assert said(kept(tmp_path / "ckpt", tiny.config("llama", **changes)), tiny.config("llama")) == []


def test_a_limit_that_frequencies_follow_from_is_compared(tmp_path):
    def config(limit: int) -> Any:
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        return tiny.config("llama", max_position_embeddings=limit, rope_parameters=rope)

    (line,) = said(kept(tmp_path / "ckpt", config(64)), config(32))
    assert line.startswith("max_position_embeddings: 64 in the checkpoint, 32 in this run")


def test_a_flag_of_what_counts_in_the_loss_is_compared(tmp_path):
    checkpoint = kept(tmp_path / "ckpt", tiny.config("mixtral", output_router_logits=True))
    (line,) = said(checkpoint, tiny.config("mixtral", output_router_logits=False))
    assert line.startswith("output_router_logits: true in the checkpoint, false in this run")


def test_another_type_of_model_with_the_same_names_and_shapes(tmp_path):
    (line,) = said(kept(tmp_path / "ckpt", tiny.config("llama")), tiny.config("mistral"))
    assert line == 'model_type: "llama" in the checkpoint, "mistral" in this run: --hf-model names another model'


def test_a_class_that_refuses_what_it_writes(tmp_path):
    """JSON has no tuples, and the class wants one: what the files say is compared then."""
    from transformers import Mamba2Config

    checkpoint = kept(tmp_path / "ckpt", Mamba2Config(layer_norm_epsilon=0.5))
    assert said(checkpoint, Mamba2Config(layer_norm_epsilon=0.5)) == []
    (line,) = said(checkpoint, Mamba2Config(layer_norm_epsilon=0.25))
    assert line.startswith("layer_norm_epsilon: 0.5 in the checkpoint, 0.25 in this run")


def test_a_run_that_begins_anew_is_told(tmp_path, capsys):
    checkpoint = kept(tmp_path / "ckpt", tiny.config("llama", rms_norm_eps=0.01))
    tell_of_another_config(checkpoint, tiny.config("llama", rms_norm_eps=0.01))
    assert capsys.readouterr().out == ""
    tell_of_another_config(checkpoint, tiny.config("llama"))
    assert "rms_norm_eps: 0.01 in the checkpoint, 1e-06 in this run" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000, "\ud800"])
def test_a_config_that_is_none_is_refused(tmp_path, content):
    checkpoint = kept(tmp_path / "ckpt", tiny.config("llama"))
    path = checkpoint / HF_FILES / "config.json"
    path.write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(CheckpointError, match=f"{path}: .*; expected the JSON of an HF config"):
        refuse_another_config(checkpoint, tiny.config("llama"))


def test_a_checkpoint_without_a_config_is_said(tmp_path, capsys):
    refuse_another_config(tmp_path, tiny.config("llama"))
    assert f"{tmp_path} has no hf_model/config.json" in capsys.readouterr().out
