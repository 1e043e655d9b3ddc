"""Estimates a layer's time on a GPU from what ``layer_kernels.py`` counts: a ruler for contenders, not a forecast.

Products and attention are the same mathematics for all, so Megatron's stand for all. What differs is what memory
bounds, and the number of kernels. Efficiencies are the planner's (``megasched/planner/hardware/gpus``).
"""

from __future__ import annotations

import re
from typing import Any

import shapes

_PRODUCT = re.compile(r"gemm:\w+ (\d+)x(\d+)x(\d+)")
# Forward, and the five products of the backward against the two of the forward.
_ATTENTION_PASSES = 1 + 2.5


def milliseconds(setting: dict[str, Any], layers: dict[str, Any], gpu: str = "h100-80gb") -> dict[str, float]:
    """Milliseconds of a layer, forward and backward, by contender.

    Args:
        setting: of the results file.
        layers: of the results file; Megatron's own, ``native``, among them.
    """
    from megasched.planner.hardware.hardware import load_hardware

    card = load_hardware(gpu)
    eight = "--fp8-format" in setting["extra"]  # attention is in 16 bits
    efficiency = (eight and card.fp8_efficiency) or card.product_efficiency
    arithmetic = _products(layers["native"]) / (card.peak(1 if eight else 2) * efficiency)
    arithmetic += _attention(setting) / (card.peak(2) * card.attention_efficiency)
    bandwidth = 1e9 * card.memory_gbytes_per_s * card.memory_efficiency

    def seconds(layer: dict[str, Any]) -> float:
        launched = sum(layer[part]["kernels"] for part in ("forward", "backward"))
        return arithmetic + layer["moved_bytes"]["all"] / bandwidth + launched * card.kernel_us / 1e6

    return {name: 1000 * seconds(layer) for name, layer in layers.items()}


def _products(layer: dict[str, Any]) -> float:
    """FLOPs of a layer's products, forward and backward."""
    total = 0.0
    for part in ("forward", "backward"):
        for name, times in layer[part]["by_name"].items():
            found = _PRODUCT.match(name)
            if found:
                m, n, k = map(int, found.groups())
                total += 2.0 * m * n * k * times
    return total


def _attention(setting: dict[str, Any]) -> float:
    """FLOPs of causal attention, forward and backward."""
    config = shapes.hf_config(setting["shape"])
    length = config.max_position_embeddings
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pairs = length * length / 2
    once = 4.0 * pairs * width * config.num_attention_heads * setting["micro_batch_size"]
    return once * _ATTENTION_PASSES
