"""Run in a process of its own by test_norms.py: norms by Transformer Engine's module, beside HF's."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from tests.te import plain


def main() -> None:
    plain.install()
    from transformer_engine.pytorch import RMSNorm

    forward = RMSNorm.forward

    def counted(self: Any, x: torch.Tensor) -> Any:
        calls.append(type(self).__name__)
        return forward(self, x)

    RMSNorm.forward = counted
    print(json.dumps({family: compare(family) for family in sys.argv[1:]}))


calls: list[str] = []


def compare(family: str) -> dict[str, Any]:
    """How often Transformer Engine's norm is called, and the distances of logits and gradients from HF's."""
    from megasched.layers.fused.norms import fuse_norms
    from tests.lowering.models import tiny_model
    from tests.lowering.parity import distance

    fused, same = tiny_model(family), tiny_model(family)
    before = {name: id(held) for name, held in fused.named_parameters()}
    fuse_norms(fused, lambda path: True, te=True)
    calls.clear()
    ids = torch.arange(3, 11)[None]
    outputs = [model(input_ids=ids, labels=ids, use_cache=False) for model in (fused, same)]
    for output in outputs:
        output.loss.backward()
    gradients = zip(fused.named_parameters(), same.parameters(), strict=True)
    return {
        "calls": len(calls),
        "logits": distance(*(output.logits.detach() for output in outputs)),
        "gradients": max(distance(one.grad, other.grad, 1e-3) for (_, one), other in gradients),
        "same parameters": {name: id(held) for name, held in fused.named_parameters()} == before,
    }


if __name__ == "__main__":
    main()
