"""Run in a process of its own by test_attention.py: attention by Transformer Engine's module, beside torch's."""

from __future__ import annotations

import json
from typing import Any

import torch

from tests.te import plain

HEADS, GROUPS, LENGTH, WIDTH = 4, 2, 7, 8


def main() -> None:
    plain.install()
    from megasched.layers.te import attention

    kernel = attention.te_caps_logits()  # no flash-attn here
    found: dict[str, Any] = {name: compare(**options) for name, options in CASES.items()}
    found["softcap without flash-attn"] = compare(softcap=2.0, flash=False)
    found |= {name: compare(memory=memory, sizes=sizes) for name, (sizes, memory) in MEMORY.items()}
    found["a kernel for soft caps"] = kernel
    found["memory"] = list(MEMORY)
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


def heads_first(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.contiguous() for t in tensors]


def tokens_first(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """As the output of a linear is viewed."""
    return [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]


def packed(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Parts of one linear's output, [b, s, heads * d]."""
    joined = torch.cat([t.transpose(1, 2).flatten(2) for t in tensors], -1)
    parts = joined.split([t.shape[1] * WIDTH for t in tensors], -1)
    return [t.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for t in parts]


def stacked(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous for Transformer Engine, one behind the other in one storage, the values before the keys."""
    q, k, v = (t.transpose(1, 2).flatten() for t in tensors)
    parts = torch.cat([q, v, k]).split([q.numel(), v.numel(), k.numel()])
    order = (parts[0], parts[2], parts[1])
    return [part.view(t.transpose(1, 2).shape).transpose(1, 2) for part, t in zip(order, tensors, strict=True)]


def keys_are_values(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    q, k, _ = tokens_first(tensors)
    return [q, k, k]


# How q, k and v lie in memory -> batch, heads and groups; how they are laid so.
MEMORY: dict[str, tuple[tuple[int, int, int], Any]] = {
    f"{memory.__name__}, {groups} of {heads} heads, {batch} rows": ((batch, heads, groups), memory)
    for memory in (heads_first, tokens_first, packed, stacked, keys_are_values)
    for batch, heads, groups in ((2, 4, 2), (2, 4, 1), (1, 4, 1), (1, 1, 1), (2, 2, 2))
}


def compare(
    flash: bool = True,
    sinks: bool = False,
    sizes: tuple[int, int, int] = (2, HEADS, GROUPS),
    memory: Any = heads_first,
    **options: Any,
) -> dict[str, Any]:
    """Modules of Transformer Engine that were made, why none was, and distances of output and gradients.

    Args:
        sizes: batch, heads and groups.
        memory: lays q, k and v out.
    """
    from torch import nn

    from megasched.layers.attention import AttentionSettings, attention_forward
    from megasched.layers.te import attention

    attention.te_caps_logits = lambda: flash
    plain.layouts.clear()
    core = attention.TeCore(1, None)
    module = nn.Module()
    generator = torch.Generator().manual_seed(0)
    batch, heads, groups = sizes
    tensors = [
        torch.randn(batch, count, LENGTH, WIDTH, generator=generator, requires_grad=True)
        for count in (heads, groups, groups)
    ]
    if sinks:
        module.sinks = nn.Parameter(torch.linspace(-1, 2, HEADS))
        tensors.append(module.sinks)
        options["s_aux"] = module.sinks
    results = []
    for te in (None, core):
        module.megasched_attention = AttentionSettings(heads, False, te)
        mask = options.get("attention_mask")
        rest = {name: value for name, value in options.items() if name != "attention_mask"}
        output = attention_forward(module, *memory(tensors[:3]), mask, **rest)[0]
        weights = torch.linspace(0.5, 1.5, output.numel()).view_as(output)
        results.append([output, *torch.autograd.grad((output * weights).sum(), tensors, materialize_grads=True)])
    made = [
        [core.window_size, core.softmax_type, core.softcap, core.num_gqa_groups] for core in core._made.values()
    ]
    return {
        "made": made,
        "reasons": sorted(module.megasched_attention.logged),
        "layouts": sorted(set(plain.layouts)),
        "distance": max(gap(got, want) for want, got in zip(*results, strict=True)),
        "parameters": sorted(name for name, _ in module.named_parameters()),
    }


def gap(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-3))


if __name__ == "__main__":
    main()
