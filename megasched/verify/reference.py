"""Runs the reference of the matrix and the parity tests: the unscheduled definition in a rank, in float32.

`megasched verify` has a reference that shares nothing with megasched: ``plain/reference.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from megasched.definition.build import build_definition, load_config
from megasched.definition.objectives import CAUSAL_LM, Objective
from megasched.definition.small_models.shrink import TOKENS
from megasched.verify.plain.draws import MeanDraws
from megasched.verify.plain.loading import nudge, own_experts
from megasched.verify.plain.loss import IGNORED, labels_of, loss_of
from megasched.verify.plain.watching import Float64, Sightings
from megasched.weights.hf.folder import HFFolder
from megasched.weights.random_init import RandomInit
from megasched.weights.source import WeightSource, materialize

FLOOR = 1e-2
DRAWS = 3  # of roundings, before a number that is off counts as wrong
_TAKES = "megasched_labels"  # attribute of a reference: what ``labels_of`` says of it
_LENGTH = 16  # of the sequence by which that is told


@dataclass
class HfStep:
    """Holds loss, logits and gradients of the unscheduled definition on one global batch.

    ``sightings`` has what its modules took and gave in one micro-batch, where they were watched.
    """

    loss: float
    logits: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    grad_norm: float
    sightings: Sightings | None = None


def hf_model(
    folder: str,
    seed: int = 1234,
    objective: Objective = CAUSAL_LM,
    *,
    random_init: bool = True,
    trust_remote_code: bool = False,
    **changes: Any,
) -> Any:
    """Returns the unscheduled HF model with the folder's weights, or those that ``--hf-random-init`` gives it."""
    config = load_config(folder, trust_remote_code=trust_remote_code)
    for name, value in changes.items():
        setattr(config, name, value)
    definition = build_definition(config, objective, trust_remote_code=trust_remote_code)
    source: WeightSource = RandomInit(definition, seed) if random_init else HFFolder(folder, definition)
    model = materialize(definition, source).train()
    if objective is CAUSAL_LM:
        setattr(model, _TAKES, labels_of(model, torch.arange(TOKENS[0], TOKENS[0] + _LENGTH)[None]))
    return model


def hf_loss(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the class's own loss, as a user of transformers has it, and its logits.

    Args:
        model: a model by ``hf_model``.
        labels: [b, s], the id that belongs at each position; none at the last one, where no class has one.
    """
    if bool((labels[:, -1] != IGNORED).any()):
        raise ValueError("no label belongs at the last position: a class that moves them does not look there")
    return loss_of(model, {"input_ids": tokens}, labels, getattr(model, _TAKES))


def hf_step(
    folder: str,
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    *,
    random_init: bool = True,
    trust_remote_code: bool = False,
    in_float64: bool = False,
    per_token: bool = False,
    draw: int = 0,
    mean_draws: bool = False,
) -> HfStep:
    """Runs one global batch through the unscheduled definition in plain torch.

    Args:
        per_token: give the same weight to each label (``--calculate-per-token-loss``), not to each micro-batch.
        in_float64: compute in float64 throughout, whatever the definition's own code says.
        draw: of ``nudge``, which changes each weight by a rounding.
        mean_draws: as ``MeanDraws``.
    """
    model = hf_model(folder, random_init=random_init, trust_remote_code=trust_remote_code)
    nudge(model, draw)
    if in_float64:
        own_experts(model)
        model = model.double()
    with Float64() if in_float64 else nullcontext(), MeanDraws() if mean_draws else nullcontext():
        return _step_of(model, batches, per_token)


@dataclass(frozen=True)
class Rounding:
    """Tells what rounding does to a step of the unscheduled model.

    Attributes:
        exact: the step in float64.
        errors: how far the step in float32 is from it, as ``differences``: the furthest of ``DRAWS``.
    """

    exact: HfStep
    errors: dict[str, float]


def rounding_of(folder: str, batches: list[tuple[torch.Tensor, torch.Tensor]], **options: Any) -> Rounding:
    """Runs a global batch in float32 and float64, again and again.

    Args:
        options: of ``hf_step``.
    """
    in_both = [
        [hf_step(folder, batches, draw=draw, in_float64=double, **options) for double in (False, True)]
        for draw in range(DRAWS)
    ]
    errors = [differences(plain, exact) for plain, exact in in_both]
    return Rounding(in_both[0][1], {name: max(one[name] for one in errors) for name in errors[0]})


def _step_of(model: Any, batches: list[tuple[torch.Tensor, torch.Tensor]], per_token: bool) -> HfStep:
    outcomes = [hf_loss(model, *batch) for batch in batches]
    counts = [int((labels != IGNORED).sum()) for _, labels in batches]
    return summed_step(model, outcomes, counts, per_token)


def summed_step(
    model: Any, outcomes: list[tuple[torch.Tensor, torch.Tensor]], counts: list[int], per_token: bool = False
) -> HfStep:
    """Runs the backward of each micro-batch and sums them up to a step, as Megatron does.

    In the gradient each micro-batch has the same weight, and in the reported loss each label.

    Args:
        outcomes, counts: (mean loss, logits) of each micro-batch, and how many of its labels count.
        per_token: give each label the same weight in the gradient, too.
    """
    total, logits = 0.0, []
    for (loss, out), count in zip(outcomes, counts, strict=True):
        share = count / sum(counts)
        (loss * share if per_token else loss / len(outcomes)).backward()
        total += float(loss.detach()) * share
        logits.append(out.detach())
    # A parameter that is not used has no gradient, and is compared with zeros.
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    norm = torch.stack([g.norm(dtype=torch.float64) for g in gradients.values()]).norm().item()
    return HfStep(total, logits, gradients, norm)


def differences(got: HfStep, expected: HfStep) -> dict[str, float]:
    """Returns the relative errors of a step: ``loss``, ``logits``, ``grad_norm`` and each gradient by name.

    A gradient that is zero but for rounding (a key's bias) is measured against a part of the largest one.
    """
    floor = floor_of(expected.gradients)
    pairs = zip(got.logits, expected.logits, strict=True)
    return {
        "loss": off_by(got.loss, expected.loss),
        "logits": max(relative(mine, wanted) for mine, wanted in pairs),
        "grad_norm": off_by(got.grad_norm, expected.grad_norm),
        **{name: relative(got.gradients[name], wanted, floor) for name, wanted in expected.gradients.items()},
    }


def floor_of(gradients: Mapping[str, torch.Tensor]) -> float:
    """Returns the least size that errors of gradients are relative to, as one of nearly zero is noise."""
    return FLOOR * largest_of(gradients)


def largest_of(tensors: Mapping[str, torch.Tensor]) -> float:
    """Returns the largest size of the numbers of several tensors."""
    return max(map(largest, tensors.values()), default=0.0)


def largest(tensor: torch.Tensor) -> float:
    """Returns the largest size of a tensor's numbers; 0 where it has none, like the weight of 0 shared experts."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def off_by(got: float, expected: float) -> float:
    """Returns the relative error of a number."""
    return abs(got - expected) / max(abs(expected), 1e-30)


def largest_finite(tensor: torch.Tensor) -> float:
    """Returns the largest size of a tensor's finite numbers; masks have others, too."""
    return largest(tensor[tensor.isfinite()].double())


def furthest(numbers: Iterable[float], right: float) -> float:
    """Returns the number that is furthest from the right one: NaN, if one is that."""
    return max(numbers, key=lambda number: (math.isnan(number), abs(number - right)))


def apart(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest difference: infinity where there is NaN on either side, none of equal infinities."""
    off = largest((got - expected)[got != expected])
    return math.inf if math.isnan(off) else off


def relative(got: torch.Tensor, expected: torch.Tensor, floor: float = 0.0) -> float:
    """Returns how far apart they are, relative to the largest value expected, or to ``floor`` if that is more."""
    off, size = apart(got, expected), max(largest_finite(expected), floor)
    return off / size if size else (0.0 if off == 0 else math.inf)
