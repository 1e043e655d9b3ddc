"""Ready patterns, each in the ways in which models spell it.

A spelling's name up to a ``/`` says what is computed (``tanh`` and ``erf`` are different functions), what
follows only how it is written.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from megasched.graph.match import SMALLEST_SIZE
from megasched.graph.pattern import EXAMPLE, Pattern, anything, call

__all__ = [
    "READY",
    "anything",
    "bias_gelu",
    "call",
    "dropout_add",
    "gelu",
    "layer_norm",
    "rms_norm",
    "rotary",
    "softmax_cross_entropy",
    "swiglu",
]

_C = math.sqrt(2 / math.pi)
_GELU = {
    "erf": lambda x: F.gelu(x),
    "tanh": lambda x: F.gelu(x, approximate="tanh"),
    "erf/spelled out": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "tanh/spelled out": lambda x: 0.5 * x * (1.0 + torch.tanh(_C * (x + 0.044715 * torch.pow(x, 3.0)))),
    "tanh/factored": lambda x: 0.5 * x * (1.0 + torch.tanh(x * _C * (1.0 + 0.044715 * x * x))),
    "sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
}


def _after_bias(spelling):  # type: ignore[no-untyped-def]
    return lambda x, bias: spelling(x + bias)


def _rms(x: Tensor, eps: float) -> Tensor:
    x = x.to(torch.float32)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * _rms(x, eps).to(x.dtype)


def _rms_norm_offset(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _rms(x, eps) * (1.0 + weight.float())


def _rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def _rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


gelu = Pattern("gelu", _GELU)
bias_gelu = Pattern("bias_gelu", {name: _after_bias(spelling) for name, spelling in _GELU.items()})
rms_norm = Pattern(
    "rms_norm",
    {"": _rms_norm, "fused": _rms_norm_torch, "offset": _rms_norm_offset},
    {"weight": EXAMPLE[-1:]},
)
layer_norm = Pattern("layer_norm", {"": _layer_norm}, {"weight": EXAMPLE[-1:], "bias": EXAMPLE[-1:]})
swiglu = Pattern(
    "swiglu",
    {"": lambda gate, up: F.silu(gate) * up, "/spelled out": lambda gate, up: gate * torch.sigmoid(gate) * up},
)
_HEADS = (SMALLEST_SIZE, SMALLEST_SIZE + 2, SMALLEST_SIZE + 6, 38)
rotary = Pattern("rotary", {"": _rotary}, dict.fromkeys(("x", "cos", "sin"), _HEADS))
softmax_cross_entropy = Pattern(
    "softmax_cross_entropy",
    {
        "": lambda logits, labels: F.cross_entropy(logits, labels),
        "/two steps": lambda logits, labels: F.nll_loss(F.log_softmax(logits, dim=-1), labels),
    },
    {"logits": (17, 38), "labels": torch.zeros(17, dtype=torch.long)},
)


def _dropout_add(x: Tensor, residual: Tensor, p: float) -> Tensor:
    return F.dropout(x, p, True) + residual


dropout_add = Pattern("dropout_add", {"": _dropout_add})

READY = {
    pattern.name: pattern
    for pattern in (
        bias_gelu,
        gelu,
        rms_norm,
        layer_norm,
        swiglu,
        rotary,
        softmax_cross_entropy,
        dropout_add,
    )
}
