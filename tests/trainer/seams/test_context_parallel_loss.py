"""What Megatron divides a rank's loss by: the labels on all parts of the sequences."""

from functools import wraps
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megasched.attributes import resolve, set_attribute
from megasched.errors import ConfigError
from megasched.patches import apply, registry
from megasched.trainer import current_session
from megasched.trainer.seams import context_parallel_loss
from megasched.verify.ranks.pool import init_megatron

LABELS = (1, 3)  # that count, on each of two ranks; each has a loss of 6


def _loss_of_a_checkout(labels):
    """As the ``loss_func`` of pretrain_gpt.py returns it."""

    def loss_func(output_tensor, non_loss_data=False):
        if non_loss_data:
            return "loss", "and", "logits"
        return output_tensor.clone(), labels, [output_tensor.item(), labels.item()]

    return loss_func


def _mean(output_tensor, non_loss_data=False):
    return output_tensor.clone(), {}


def _losses(scheduled):
    """This rank's loss, number and report: a checkout's loss, the same by token, a mean, and what is no loss."""
    from megatron.core.pipeline_parallel import schedules

    init_megatron(cp=2)
    apply("context_parallel_loss")
    checkout, found = _loss_of_a_checkout(torch.tensor(LABELS[torch.distributed.get_rank()])), []
    cases = [(checkout, False, False), (checkout, True, False), (_mean, False, False), (checkout, False, True)]
    with mock.patch.object(current_session, "_current", [object()] if scheduled else []):
        for loss_func, per_token, other in cases:
            config, data = SimpleNamespace(calculate_per_token_loss=per_token, timers=None), []
            given = (None, torch.tensor(6.0), loss_func, config, None, other, 2, data, 2, True)
            loss, number = schedules.forward_step_calc_loss(*given)
            found.append((loss.item(), number.item(), data[0]))
    return found


def test_a_loss_is_divided_by_the_labels_of_all_parts(ranks):
    """Two micro-batches; gradients are averaged over two ranks: each has twice its share of a mean over four."""
    for rank, [sums, by_token, mean, other] in enumerate(ranks.run(2, _losses, True)):
        assert sums == (6 * 2 / sum(LABELS) / 2, sum(LABELS), [6, LABELS[rank]])
        assert by_token == (6, LABELS[rank], [6, LABELS[rank]])
        assert mean == (6 * 2 / 2, 0, {})
        assert other == (6, 0, ("loss", "and", "logits"))


def test_megatrons_own_models_keep_megatrons_loss(ranks):
    for rank, [sums, *_] in enumerate(ranks.run(2, _losses, False)):
        assert sums == (6 / LABELS[rank] / 2, LABELS[rank], [6, LABELS[rank]])


def test_a_megatron_that_divides_by_something_else_is_refused(monkeypatch):
    @wraps(resolve(context_parallel_loss._TARGET))
    def of_all_ranks(*given):
        return torch.tensor(1.0), torch.tensor(6)

    monkeypatch.setattr(registry, "_undos", {})
    undo = set_attribute(context_parallel_loss._TARGET, of_all_ranks)
    try:
        with pytest.raises(ConfigError, match=r"makes 1\.0 of a loss of 6 over 3 labels, not 2"):
            registry.apply("context_parallel_loss")
    finally:
        undo()
