"""The yardstick of arithmetic in bf16: plain Hugging Face's own step, in bf16 and in float64."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from megasched.definition.build import cast_as_loaded
from megasched.verify.plain.loading import own_experts, widen
from megasched.verify.plain.watching import Float64
from megasched.verify.reference import HfStep, hf_loss, hf_model


def rounded_step(
    folder: str,
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    dtype: torch.dtype,
    *,
    device: torch.device | str = "cpu",
    eager: bool = False,
) -> HfStep:
    """Runs one global batch through plain HF with weights and buffers rounded to bf16.

    Those that transformers keeps in float32 are not rounded.

    Args:
        dtype: dtype of the arithmetic: bfloat16, or float64 for the exact result. Gradients are added up in
            float64 over the micro-batches, and the softmax of the loss is in float32 at least.
        device: where it runs, and where the batches are.
        eager: attention and experts as the class's own file computes them: the same, rounded in another way.
    """
    model = hf_model(folder)
    cast_as_loaded(model, torch.bfloat16)
    widen(model.to(device), dtype)
    if eager:
        model.set_attn_implementation("eager")
    if eager or dtype == torch.float64:
        own_experts(model)
    total, logits = 0.0, []
    gradients = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    for tokens, labels in batches:
        model.zero_grad()
        with Float64() if dtype == torch.float64 else nullcontext():
            loss, output = hf_loss(model, tokens, labels)
        (loss / len(batches)).backward()
        total += float(loss.detach()) / len(batches)
        logits.append(output.detach().double())
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[name] += parameter.grad
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    return HfStep(total, logits, gradients, norm)
