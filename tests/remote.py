"""Models that come with code of their own: Llamas whose layers have another module for their MLP."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

from tests import tiny

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast


class MineConfig(LlamaConfig):
    model_type = "mine_of_a_test"


"""
OF_MLP = """
class Mine(LlamaForCausalLM):
    config_class = MineConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Mlp(config)
        self.post_init()


"""
CHANGED = """
class Mine(LlamaForCausalLM):
    config_class = MineConfig

    def __init__(self, config):
        super().__init__(config)
        self.change(config)
        self.post_init()

    def change(self, config):
        {lines}
"""
OF_LOGITS = """
class Mine(LlamaForCausalLM):
    config_class = MineConfig

    def forward(self, input_ids=None, labels=None, shift_labels=None, **kwargs):
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        {lines}
        loss, size = None, self.config.vocab_size
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=size, shift_labels=shift_labels)
        return CausalLMOutputWithPast(loss=loss, logits=logits)
"""


def write(folder: Path, code: str, **changes: Any) -> str:
    """A folder without weights.

    Args:
        code: with a class ``Mlp``.
        changes: of the config.
    """
    return _write(folder, OF_MLP + dedent(code), **changes)


def write_changed(folder: Path, lines: str) -> str:
    """The same of a Llama to whose modules these lines do something after they are made."""
    return _write(folder, CHANGED.format(lines=indent(dedent(lines), " " * 8).strip()))


def write_of_logits(folder: Path, lines: str) -> str:
    """The same of a Llama that makes something else of its ``logits``."""
    return write_of_hidden(folder, "logits = self.lm_head(hidden)\n" + dedent(lines))


def write_of_hidden(folder: Path, lines: str, **changes: Any) -> str:
    """The same of a Llama that makes its ``logits`` of what is ``hidden`` after the layers."""
    return _write(folder, OF_LOGITS.format(lines=indent(dedent(lines), " " * 8).strip()), **changes)


def write_whole(folder: Path, code: str) -> str:
    """The same with a class ``Mine`` of the code's own."""
    return _write(folder, code)


def _write(folder: Path, code: str, **changes: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "modeling_mine.py").write_text(HEAD + code)
    config = tiny.config("llama", **{"num_hidden_layers": 2, **changes}).to_dict()
    config |= {"model_type": "mine_of_a_test", "architectures": ["Mine"]}
    config["auto_map"] = {
        "AutoConfig": "modeling_mine.MineConfig",
        "AutoModelForCausalLM": "modeling_mine.Mine",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
