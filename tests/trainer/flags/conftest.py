"""Folders of small models for these tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.flags.models import GPT2, SMALL, config


@pytest.fixture
def hf_model(tmp_path: Path) -> str:
    folder = tmp_path / "llama"
    config("llama", **SMALL, num_key_value_heads=2).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def gpt2_model(tmp_path: Path) -> str:
    folder = tmp_path / "gpt2"
    config("gpt2", **GPT2, resid_pdrop=0.0, attn_pdrop=0.0).save_pretrained(folder)
    return str(folder)
