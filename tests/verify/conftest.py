"""Undoes what the schedule files of mistakes reach into: verify plans a schedule in this process, too."""

import pytest

from megasched.layers import build_context
from megasched.lowering import lower
from megasched.trainer.losses.loss import VocabParallelLoss
from megasched.trainer.scheduled_model import ScheduledModel

PLANTED = (
    (lower, "lower_linear"),
    (build_context, "reduce_partial_gradient"),
    (ScheduledModel, "_share"),
    (VocabParallelLoss, "__call__"),
)


@pytest.fixture(autouse=True)
def unplanted(monkeypatch):
    from megatron.core.optimizer.optimizer import FP32Optimizer

    from megasched.launch import pretrain_gpt

    for owner, name in (*PLANTED, (FP32Optimizer, "step_with_ready_grads"), (pretrain_gpt, "loss_func")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
