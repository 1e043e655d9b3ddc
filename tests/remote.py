"""Models that come with code of their own: Llamas whose layers have another module for their MLP."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent
from typing import Any

from tests import tiny

HEAD = """
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


class MineConfig(LlamaConfig):
    model_type = "mine_of_a_test"


class Mine(LlamaForCausalLM):
    config_class = MineConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Mlp(config)
        self.post_init()


"""


def write(folder: Path, code: str, **changes: Any) -> str:
    """A folder without weights.

    Args:
        code: with a class ``Mlp``.
        changes: of the config.
    """
    folder.mkdir(exist_ok=True)
    (folder / "modeling_mine.py").write_text(HEAD + dedent(code))
    config = tiny.config("llama", **changes).to_dict()
    config |= {"model_type": "mine_of_a_test", "architectures": ["Mine"]}
    config["auto_map"] = {
        "AutoConfig": "modeling_mine.MineConfig",
        "AutoModelForCausalLM": "modeling_mine.Mine",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
