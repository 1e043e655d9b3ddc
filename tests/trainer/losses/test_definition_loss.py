"""The labels that a definition's own code is handed, and what Megatron gets of its loss."""

from __future__ import annotations

import pytest
import torch

from megasched.analysis.stages.loss_labels import LossLabels
from megasched.errors import ConfigError
from megasched.trainer.losses.definition_loss import DefinitionLoss
from megasched.trainer.stages.stage_transfer import StageBuffers

LABELS = torch.tensor([[11, 12, 13, 14, 15], [21, 22, 23, 24, 25]])
MASK = torch.tensor([[1.0, 0, 1, 1, 0], [1, 1, 1, 0, 1]])


def loss_of(takes, *, last=True):
    return DefinitionLoss(takes, lambda batch, length: (batch, length), last=last)


def handed_over(takes, mask):
    wire = StageBuffers(batch=2, length=5, device=torch.device("cpu"))
    return loss_of(takes).arguments(LABELS, mask, wire)


@pytest.mark.parametrize(
    ("takes", "handed"),
    [
        (LossLabels(True, True), [[11, 11, -100, 13, 14], [21, 21, 22, 23, -100]]),
        (LossLabels(False, True), [[11, -100, 13, 14, -100], [21, 22, 23, -100, 25]]),
        (LossLabels(True, True, 2), [[-100, 13, 14], [22, 23, -100]]),
    ],
)
def test_what_does_not_count_is_told(takes, handed):
    assert handed_over(takes, MASK)["labels"].tolist() == handed


def test_labels_that_are_moved_already_are_handed_over_beside_the_ids():
    given = handed_over(LossLabels(False, True, shifted=True), MASK)
    assert given["labels"].tolist() == [[11, 11, -100, 13, 14], [21, 21, 22, 23, -100]]
    assert given["shift_labels"].tolist() == [[11, -100, 13, 14, -100], [21, 22, 23, -100, 25]]


def test_the_last_position_need_not_be_told_where_the_code_does_not_look_there():
    mask = torch.ones(2, 5)
    mask[:, -1] = 0
    assert handed_over(LossLabels(True, False), mask)["labels"][0].tolist() == [11, 11, 12, 13, 14]
    with pytest.raises(ConfigError, match="is not 1 everywhere"):
        handed_over(LossLabels(False, False), mask)


@pytest.mark.parametrize(
    ("takes", "mask", "why"),
    [
        (LossLabels(True, False), MASK, "labels of -100 for others"),
        (LossLabels(True, True), MASK / 2, "not to count in part"),
        (LossLabels(True, True), None, "hand loss_mask to the model"),
        (LossLabels(True, True, 4), MASK, "leaves out the first 4 positions, and sequences have 5"),
    ],
)
def test_what_cannot_be_told_ends_the_run(takes, mask, why):
    with pytest.raises(ConfigError, match=why):
        handed_over(takes, mask)


def through_megatron(loss, each, mask):
    """As its ``loss_func`` and ``forward_step_calc_loss`` have it."""
    return (each * mask).sum() / mask.sum().clamp(min=1)


def test_megatron_comes_to_the_same_number_and_gradient():
    loss, own = loss_of(LossLabels(True, True)), torch.tensor(2.5, requires_grad=True)
    loss.masked_labels(LABELS, MASK)
    each = loss.each(torch.empty(0), own, LABELS)
    assert (each.shape, each.is_contiguous(), each.dtype) == (LABELS.shape, True, torch.float32)
    found = through_megatron(loss, each, MASK)
    found.backward()
    torch.testing.assert_close(found.detach(), torch.tensor(2.5))
    torch.testing.assert_close(own.grad, torch.tensor(1.0))


def test_a_micro_batch_in_which_nothing_counts_weighs_nothing():
    """Its last label counts, to Megatron; the code does not look there."""
    mask = torch.zeros(2, 5)
    mask[0, -1] = 1
    loss, own = loss_of(LossLabels(True, True)), torch.tensor(2.5, requires_grad=True)
    assert (loss.masked_labels(LABELS, mask) > 0).all()
    through_megatron(loss, loss.each(torch.empty(0), own, LABELS), mask).backward()
    assert own.grad == 0


def test_stages_before_the_last_get_labels_of_the_same_shape():
    wire = StageBuffers(batch=2, length=5, device=torch.device("cpu"))
    given = loss_of(LossLabels(True, True, 2), last=False).arguments(None, None, wire)
    assert given["labels"].shape == (2, 3)
    assert loss_of(LossLabels(True, True)).arguments(None, None, wire) == {}
