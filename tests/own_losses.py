"""Llamas whose own code computes the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megasched.verify.reference import HfStep, hf_model, summed_step
from tests import remote

FORWARD = """
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaMLP as Mlp


def shifted(logits, labels, by=1, **more):
    return F.cross_entropy(logits[:, :-by].flatten(0, 1), labels[:, by:].flatten(), **more)


class Mine(Mine):
    def __init__(self, config):
        super().__init__(config)
        self.second = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids=None, labels=None, position_ids=None, **kwargs):
        hidden = self.model(input_ids=input_ids, position_ids=position_ids, **kwargs).last_hidden_state
        logits = self.lm_head(hidden)
        loss = None if labels is None else self.of(logits, labels, hidden, input_ids)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    def of(self, logits, labels, hidden, input_ids):
"""
# It takes labels that are moved already, too.
SHIFTING = """
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaMLP as Mlp


class Mine(Mine):
    def __init__(self, config):
        super().__init__(config)
        self.second = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids=None, labels=None, shift_labels=None, position_ids=None, **kwargs):
        hidden = self.model(input_ids=input_ids, position_ids=position_ids, **kwargs).last_hidden_state
        logits, loss = self.lm_head(hidden), None
        if labels is not None:
            of = dict(labels=labels, vocab_size=self.config.vocab_size, shift_labels=shift_labels)
            loss = self.loss_function(logits=logits, **of) + 0.3 * self.loss_function(self.second(hidden), **of)
        return CausalLMOutputWithPast(loss=loss, logits=logits)
"""
NEEDS_SHIFTED = """
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaMLP as Mlp


class Mine(Mine):
    def loss_function(self, logits=None, labels=None, vocab_size=None, shift_labels=None, **kwargs):
        return F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), label_smoothing=0.1)
"""
LOSSES = {
    "label smoothing": "return shifted(logits, labels, label_smoothing=0.1)",
    "a z-loss by hand": "return shifted(logits, labels) + 1e-2 * logits.logsumexp(-1).square().mean()",
    "its own mask": "return shifted(logits, labels.masked_fill(torch.arange(labels.shape[1]) < 5, -100))",
    "a mask by ids": "return shifted(logits, labels.masked_fill(input_ids % 7 == 3, -100))",
    "two heads": "return shifted(logits, labels) + 0.3 * shifted(self.second(hidden), labels, 2)",
    "two calls": """a, b = (
            self.loss_function(logits=each, labels=labels, vocab_size=self.config.vocab_size)
            for each in (logits, self.second(hidden))
        )
        return a + 0.3 * b""",
    "one id left out": "return shifted(logits, labels.masked_fill(labels == 50, -100))",
    "rows against each other": """rows = F.normalize(hidden.mean(1), dim=-1)
        return shifted(logits, labels) + 0.1 * F.cross_entropy(10 * rows @ rows.T, torch.arange(len(rows)))""",
    "labels of the same places": """
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)""",
}


def step_by_shifted(folder: str, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> HfStep:
    """As ``hf_step``; transformers gets the label of the last position, too: those that are moved already."""
    model = hf_model(folder, trust_remote_code=True)
    outputs = [model(input_ids=ids, labels=ids, shift_labels=labels.contiguous()) for ids, labels in batches]
    counts = [labels.numel() for _, labels in batches]
    return summed_step(model, [(output.loss, output.logits) for output in outputs], counts)


def write(folder: Path, loss: str, **changes: Any) -> str:
    """A folder without weights, of two layers: the loss comes after them.

    Args:
        loss: body of a function of logits, labels, hidden and input_ids.
        changes: of the config.
    """
    return remote.write(folder, FORWARD + " " * 8 + loss + "\n", **{"num_hidden_layers": 2, **changes})
