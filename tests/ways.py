"""Definitions whose code goes by values, or by the length of a sequence: HF's numbers are due, or a refusal."""

from __future__ import annotations

from textwrap import dedent, indent

from packaging.version import Version
from torch import __version__

# From torch 2.15 on, an operation on meta tells of what ``torch.tensor`` makes there. A module that sums up a list
# as long as the sequence gets the whole of it then; before, it is refused.
SEES_TENSORS_OF_LISTS = Version(__version__) >= Version("2.15")

_MLP = """
from transformers.models.llama.modeling_llama import LlamaMLP


class Mlp(LlamaMLP):
    def forward(self, x):
        h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
{}
        return self.down_proj(h)
"""

_MODEL = """
from transformers.models.llama.modeling_llama import LlamaMLP

Other = Mine


class Mlp(LlamaMLP):
    scale = 1.0

    def forward(self, x):
        return super().forward(x) * self.scale


class Mine(Other):
    def forward(self, input_ids=None, labels=None, position_ids=None, **kwargs):
{}
        return super().forward(input_ids=input_ids, labels=labels, position_ids=position_ids, **kwargs)
"""

_LAYERS = """
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaMLP as Mlp
from transformers.models.llama.modeling_llama import LlamaModel

Other = Mine


class Inner(LlamaModel):
    def forward(self, input_ids=None, position_ids=None, **kwargs):
        x = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device)[None]
        positions = self.rotary_emb(x, position_ids=position_ids)
        given = dict(attention_mask=None, past_key_values=None, position_ids=position_ids)
        mask = create_causal_mask(config=self.config, inputs_embeds=x, **given)
        for layer in self.layers:
{}
            x = layer(x, attention_mask=mask, position_ids=position_ids, position_embeddings=positions)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x))


class Mine(Other):
    def __init__(self, config):
        super().__init__(config)
        self.model.__class__ = Inner
"""


def _in(text: str, depth: int, lines: str) -> str:
    return text.format(indent(dedent(lines).strip(), " " * 4 * depth))


def mlp(lines: str) -> str:
    """Code between the columns and the row of an MLP: ``x`` [b, s, h] comes in, ``h`` [b, s, f] goes on."""
    return _in(_MLP, 2, lines)


def model(lines: str) -> str:
    """Code before the forward of the model."""
    return _in(_MODEL, 2, lines)


def layers(lines: str) -> str:
    """Code before each layer, around the layers: ``x`` is the hidden state."""
    return _in(_LAYERS, 3, lines)


BY_VALUES = {
    "the largest of a column": mlp("h = h * 2 if h.abs().max() > 1e-6 else h"),
    "a column by its largest": mlp("h = h / (1e-3 + h.abs().max().item())"),
    "by the largest": mlp("h = h / (1 + x.max().item())"),
    "any": mlp("if (x > 2.2).any():\n    h = h * 0.5"),
    "another way if large": mlp("if x.abs().max() > 0.5:\n    h = h - h.mean(-1, keepdim=True)"),
    "another way if above": mlp("if x.max().item() > 1.5:\n    h = h / (h.norm(dim=-1, keepdim=True) + 1e-3)"),
    "another way if below": mlp("if x.min().item() < -1.5:\n    h = h / (h.norm(dim=-1, keepdim=True) + 1e-3)"),
    "a size on another way": mlp("if x.abs().max() > 0.5:\n    h = h / h.shape[-1]"),
    "two questions": mlp(
        "if bool(x.abs().max() > 0.5) and not bool(x.min() > 0):\n    h = h - h.mean(-1, keepdim=True)"
    ),
    "how many of a column": mlp("h = h * ((h > 0).nonzero().shape[0] / h.numel())"),
    "how many": mlp("h = h / (1 + len(x[x[..., 0] > 0]))"),
    "a mean of some": mlp("h = h * (1 + h[h > 0].mean())"),
    "a loop": mlp("for _ in range(int(x.abs().max() * 2)):\n    h = h - 0.1 * h.mean(-1, keepdim=True)"),
    "a list of a column": mlp("h = h / (1e-3 + max(h.abs().amax(dim=(0, 1)).tolist()))"),
    "a list": mlp("h = h / (1 + max(x.amax(dim=(0, 2)).tolist()))"),
    "a check": mlp("if torch.isnan(x).any():\n    raise ValueError('nan')"),
    "a tensor of a number": mlp("h = h * torch.tensor(1 + x.max().item(), device=x.device)"),
    "a number of the ids": model(
        "for layer in self.model.layers:\n    layer.mlp.scale = 1 + input_ids.float().mean().item() / 100"
    ),
    "a number of the embeddings": model(
        "top = self.model.embed_tokens(input_ids).abs().max().item()\n"
        "for layer in self.model.layers:\n    layer.mlp.scale = 1 + 5 * top"
    ),
    "a check of the ids": model("if (input_ids < 0).any():\n    raise ValueError('ids')"),
    "an early exit": layers("if x.abs().max() > 0.02 and layer is self.layers[-1]:\n    break"),
    "a scale of the hidden state": layers("x = x * (1 + x.abs().max().item())"),
}

BY_MODE = {
    "probabilities in evaluation": mlp("h = h if self.training else 4 * h.softmax(-1)"),
    "a width in evaluation": mlp("if not self.training:\n    h = h / h.shape[-1]"),
}
BY_LENGTH = {
    "numel of a column": mlp("h = h / h.numel() ** 0.5 * 30"),
    "numel": mlp("h = h / x.numel() ** 0.5 * 30"),
    "len": mlp("h = h / len(x[0])"),
    "size": mlp("h = h / x.size(1)"),
    "groups": mlp(
        "b, s, _ = h.shape\ng = h.view(b, s, 4, -1)\n"
        "h = (g / (1e-2 + g.pow(2).mean(-1, keepdim=True)).sqrt()).flatten(2)"
    ),
    "places of a column": mlp("h = h * (1 + 0.01 * torch.arange(h.shape[1], device=h.device))[:, None]"),
    "places": mlp("h = self.up_proj(x * (1 + 0.01 * torch.arange(x.shape[1], device=x.device))[:, None])"),
    "places of another length": mlp("h = h * (1 + 0.01 * torch.arange(x.shape[1], device=h.device))[:, None]"),
    "a sum of ones": mlp("h = h * 16 / torch.ones(2 * x.shape[1], device=h.device).sum()"),
    "a tensor of the size": mlp("h = h * torch.full((), 16 / x.shape[1], device=h.device)"),
    "a list of the size": mlp("h = h * 16 / torch.tensor([1.0] * x.shape[1], device=h.device).sum()"),
    "how many ones": mlp("h = h * 16 / torch.ones(x.shape[1], device=h.device).nonzero().shape[0]"),
    "a grid": mlp("h = h * torch.linspace(0, 1, x.shape[1] + 3, device=h.device)[3] * 16"),
    "a number of a new tensor": mlp("h = h * x.new_full((), 16 / x.shape[1])"),
    "a filled tensor": mlp("h = h * torch.empty(h.shape[:2], device=h.device).fill_(16 / x.shape[1])[..., None]"),
    "a tensor of the size between layers": layers("x = x * torch.full((), 16 / x.shape[1], device=x.device)"),
    "a sum of ones between layers": layers("x = x * 16 / torch.ones(x.shape[1], device=x.device).sum()"),
    "ones for tokens": mlp("h = h * torch.ones(h.shape[:2], device=h.device)[..., None]"),
    "a sum of as many ones as features": mlp("h = h * 80 / torch.ones(h.shape[-1], device=h.device).sum()"),
    "how many ones for features": mlp("h = h * 80 / torch.ones(h.shape[-1], device=h.device).nonzero().shape[0]"),
    "a tensor of the width": mlp("h = h * torch.full((), 80 / h.shape[-1], device=h.device)"),
    "a list of the width": mlp("h = h * 80 / torch.tensor([1.0] * h.shape[-1], device=h.device).sum()"),
    "chunks": mlp(
        "c = max(1, x.shape[1] // 4)\nh = torch.cat([p - p.mean(1, keepdim=True) for p in h.split(c, dim=1)], 1)"
    ),
    "a tensor of it": mlp("h = h / torch.full((1,), float(x.shape[1]))"),
    "a tensor made of it": mlp("h = h / torch.tensor([float(x.shape[1])])"),
    "another made of it": mlp("h = h / x.new_tensor(x.shape[1])"),
    "a tensor by it": mlp("h = h / (torch.ones(1) * x.shape[1])"),
    "zeros as long": mlp("h = h + torch.zeros(x.shape[1], 1)"),
    "as many ones more": mlp(
        "b, s, f = h.shape\nh = h + torch.cat([h, torch.ones(b, x.shape[1], f)], 1).mean(1, keepdim=True)"
    ),
    "a table of it": mlp(
        "b, s, f = h.shape\ntable = torch.zeros(b * x.shape[1], f)\n"
        "h = table.index_add(0, torch.arange(b * s), h.reshape(-1, f)).view(b, s, f)"
    ),
    "numbers drawn for it": mlp(
        "own = torch.Generator().manual_seed(0)\nh = h * torch.rand(x.shape[1], 1, generator=own)"
    ),
    "a width": mlp("h = h * 30 / torch.full((1,), float(h.shape[-1]))"),
    "a tensor made of a width": mlp("h = h * 30 / h.new_tensor(float(h.shape[-1]))"),
    "an end of a width": mlp("h = h / torch.linspace(0, h.shape[-1], 3)[-1]"),
    "a backward by it": mlp(
        "class Slower(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x):\n"
        "        ctx.length = x.shape[1]\n"
        "        return x * 2\n"
        "    @staticmethod\n"
        "    def backward(ctx, grad):\n"
        "        return grad / ctx.length\n"
        "h = self.up_proj(Slower.apply(x))"
    ),
    "an output between layers": layers("x = x * torch.tensor(1 + 1 / x.shape[1])"),
    "a hidden state by its length": layers("x = x * (1 + 1 / x.shape[1])"),
    "another way if long": mlp("if x.shape[1] > 12:\n    h = h - h.mean(-1, keepdim=True)"),
    "a number if long": mlp("h = h * (2.0 if x.shape[1] > 12 else 1.0)"),
    "chunks if long": mlp(
        "if x.shape[1] > 8:\n"
        "    h = torch.cat([p / (1e-2 + p.abs().amax(-1, keepdim=True)) for p in h.split(4, dim=1)], 1)"
    ),
    "a mean if long": layers(
        "if x.shape[1] > 12 and layer is self.layers[-1]:\n    x = x - x.mean(1, keepdim=True)"
    ),
    "an early exit if long": layers("if x.shape[1] > 12 and layer is self.layers[-1]:\n    break"),
}
