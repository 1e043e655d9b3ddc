"""Makes the arguments of trial forwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from megasched.analysis.recording.meta_call import loss_function_of, sum_of_logits
from megasched.analysis.stages.loss_labels import LossLabels
from megasched.analysis.stages.shapes import SIZES
from megasched.definition.objectives import objective_of


def trial_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the batch of a trial, with labels."""
    return objective_of(model).trial(getattr(model, "config", None), *SIZES[0])


def inputs_of(
    model: nn.Module, batch: int, length: int, labels: LossLabels | None = None, *, calls_loss: bool = False
) -> dict[str, torch.Tensor]:
    """Returns a batch with labels in the form that the definition's own code takes, or without any.

    For ``calls_loss`` the labels stay unchanged.
    """
    inputs = objective_of(model).trial(getattr(model, "config", None), batch, length)
    if calls_loss:
        return inputs
    given = inputs.pop("labels")
    return inputs if labels is None else inputs | labels.arguments(given)


@contextmanager
def loss_given(model: Any, *, calls_loss: bool) -> Iterator[None]:
    """Runs its body with a stand-in for ``loss_function`` where a run replaces it, to look at the code around."""
    with loss_function_of(model, sum_of_logits) if calls_loss else nullcontext():
        yield
