"""Run in a process of its own by test_attention.py: attention by Transformer Engine's module, beside torch's."""

from __future__ import annotations

import json
from typing import Any

import torch

from tests.te import plain

HEADS, GROUPS, LENGTH, WIDTH = 4, 2, 7, 8


def main() -> None:
    plain.install()
    from megasched.lowering import attention_te

    kernel = attention_te.te_caps_logits()  # no flash-attn here
    found: dict[str, Any] = {name: compare(**options) for name, options in CASES.items()}
    found["softcap without flash-attn"] = compare(softcap=2.0, flash=False)
    found["a kernel for soft caps"] = kernel
    print(json.dumps(found))


def window(size: int) -> torch.Tensor:
    ones = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    return (ones.tril() & ~ones.tril(-size)).expand(2, 1, LENGTH, LENGTH)


CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "scaled": {"scaling": 0.3},
    "bidirectional": {"is_causal": False},
    "window": {"attention_mask": window(3), "sliding_window": 3},
    "window longer than the sequence": {"sliding_window": 50},
    "softcap": {"softcap": 2.0},
    "softcap in a window": {"softcap": 2.0, "attention_mask": window(3), "sliding_window": 3},
    "sinks": {"sinks": True},
    "sinks in a window": {"sinks": True, "attention_mask": window(3), "sliding_window": 3},
    "other mask": {"attention_mask": window(2)},
    "position bias": {"position_bias": torch.linspace(-1, 1, LENGTH)},
    "softcap and dropout": {"softcap": 2.0, "dropout": 1e-9},
    "softcap and sinks": {"softcap": 2.0, "sinks": True},
}


def compare(flash: bool = True, sinks: bool = False, **options: Any) -> dict[str, Any]:
    """Modules of Transformer Engine that were made, why none was, and distances of output and gradients."""
    from torch import nn

    from megasched.lowering import attention_te
    from megasched.lowering.attention import AttentionSettings, attention_forward

    attention_te.te_caps_logits = lambda: flash
    core = attention_te.TeCore(1, None)
    module = nn.Module()
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(2, heads, LENGTH, WIDTH, generator=generator, requires_grad=True)
        for heads in (HEADS, GROUPS, GROUPS)
    ]
    if sinks:
        module.sinks = nn.Parameter(torch.linspace(-1, 2, HEADS))
        tensors.append(module.sinks)
        options["s_aux"] = module.sinks
    results = []
    for te in (None, core):
        module.megasched_attention = AttentionSettings(HEADS, False, te)
        mask = options.get("attention_mask")
        rest = {name: value for name, value in options.items() if name != "attention_mask"}
        output = attention_forward(module, *tensors[:3], mask, **rest)[0]
        weights = torch.linspace(0.5, 1.5, output.numel()).view_as(output)
        results.append([output, *torch.autograd.grad((output * weights).sum(), tensors)])
    made = [
        [core.window_size, core.softmax_type, core.softcap, core.num_gqa_groups] for core in core._made.values()
    ]
    return {
        "made": made,
        "reasons": sorted(module.megasched_attention.told),
        "distance": max(gap(got, want) for want, got in zip(*results, strict=True)),
        "parameters": sorted(name for name, _ in module.named_parameters()),
    }


def gap(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-3))


if __name__ == "__main__":
    main()
