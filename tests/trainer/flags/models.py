"""Configs of small models, and Megatron's arguments as the patch derives them."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, PretrainedConfig

from megasched.errors import ConfigError
from megasched.trainer.flags.arguments import apply_derived, flag_parser
from megasched.trainer.flags.flag_classes import explicit_flags

SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_attention_heads": 6,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "initializer_range": 0.03,
}
GPT2 = {"n_layer": 3, "n_embd": 48, "n_head": 4, "n_positions": 32, "vocab_size": 301}


def config(model_type: str, **fields: Any) -> PretrainedConfig:
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return CONFIG_MAPPING[model_type](**(tokens | fields))


def megatron_parser() -> argparse.ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    return flag_parser(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))


def derived_args(*argv: str) -> argparse.Namespace:
    """As the patch does it."""
    args = megatron_parser().parse_args(list(argv))
    args.world_size = 1
    apply_derived(args, explicit_flags(megatron_parser(), argv))
    return args


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        derived_args(*argv)
    return str(caught.value)
