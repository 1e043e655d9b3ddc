"""Losses that are the cross entropy of the labels, batch and length of a trial, and not of all: told by what makes
them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaMLP

from megasched.analysis.find_layer_stack import layer_stack_of
from megasched.analysis.loss.loss_form import why_another_at
from megasched.analysis.stages.loss_labels import LossForm, LossLabels
from megasched.definition.build import init_empty_weights
from tests import tiny

MOVED = LossLabels(True, True)


def shifted(logits, labels, **more):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), **more)


def by_function(model, logits, labels, **more):
    return model.loss_function(logits=logits, labels=labels, vocab_size=model.config.vocab_size, **more)


def each(logits, labels):
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")


def chunks(model, logits, labels, hidden, ids):
    parts = zip(logits[:, :-1].split(32, 1), labels[:, 1:].split(32, 1), strict=True)
    losses = [F.cross_entropy(some.flatten(0, 1), wanted.flatten()) for some, wanted in parts]
    return sum(losses) / len(losses)


def sums_of_rows(model, logits, labels, hidden, ids):
    return each(logits, labels).mean(1).sum()


def the_worst_row(model, logits, labels, hidden, ids):
    return each(logits, labels).mean(1).max()


def rows_apart(model, logits, labels, hidden, ids):
    rows = F.normalize(hidden.mean(1), dim=-1)
    return shifted(logits, labels) + F.cross_entropy(10 * rows @ rows.T, torch.arange(len(rows)))


def an_id_left_out(model, logits, labels, hidden, ids):
    return shifted(logits, labels, ignore_index=70)


def an_id_left_out_by_mask(model, logits, labels, hidden, ids):
    return by_function(model, logits, labels.masked_fill(labels == 70, -100))


def tokens_left_out(model, logits, labels, hidden, ids):
    return by_function(model, logits, labels.masked_fill((ids > 60) & (ids < 75), -100))


def a_weight_of_one_id(model, logits, labels, hidden, ids):
    weights = torch.ones(logits.shape[-1], device=logits.device)
    weights[70] = 0.2
    return shifted(logits, labels, weight=weights)


def large_logits_bent(model, logits, labels, hidden, ids):
    return shifted(logits.clamp(-8, 8), labels)


def the_last_32(model, logits, labels, hidden, ids):
    return by_function(model, logits[:, -32:].contiguous(), labels[:, -32:])


def too_few_for_its_view(model, logits, labels, hidden, ids):
    """Of one row alone the last positions lie in one piece."""
    return by_function(model, logits[:, -32:], labels[:, -32:])


def the_first_24(model, logits, labels, hidden, ids):
    return by_function(model, logits, labels.masked_fill(torch.arange(labels.shape[1]) >= 24, -100))


def weighted_where_long(model, logits, labels, hidden, ids):
    losses = each(logits, labels)
    if losses.shape[1] > 40:
        losses = losses * torch.linspace(0.5, 1.5, losses.shape[1], device=losses.device)
    return losses.mean()


def by_a_value(model, logits, labels, hidden, ids):
    loss = shifted(logits, labels)
    return loss + 0.1 * logits.square().mean() if bool(hidden.abs().max() > 50) else loss


def from_the_second_call(model, logits, labels, hidden, ids):
    model.calls = getattr(model, "calls", 0) + 1
    return shifted(logits, labels, label_smoothing=0.1 if model.calls > 1 else 0.0)


OWN = [chunks, sums_of_rows, rows_apart, an_id_left_out, an_id_left_out_by_mask, tokens_left_out]
OWN += [
    a_weight_of_one_id,
    large_logits_bent,
    the_last_32,
    too_few_for_its_view,
    the_first_24,
    weighted_where_long,
]
OWN += [by_a_value, from_the_second_call, the_worst_row]


def a_bound(model, logits, labels, hidden, ids):
    """No mean of labels is as large."""
    return by_function(model, logits, labels).clamp(max=50.0)


def by_its_own_value(model, logits, labels, hidden, ids):
    loss = by_function(model, logits, labels)
    return loss * 0.5 if bool(loss > 100) else loss


def divided_by_a_number(model, logits, labels, hidden, ids):
    return by_function(model, logits, labels, num_items_in_batch=torch.tensor(labels.shape[0] * 18))


def of_an_id(model, logits, labels, hidden, ids):
    return by_function(model, logits, labels, ignore_index=70)


OF_FUNCTION = [a_bound, by_its_own_value, divided_by_a_number, of_an_id]


def plus_and_times(model, logits, labels, hidden, ids):
    loss = by_function(model, 2 * logits, labels)
    loss += 0.1 * hidden.square().mean() - logits.float().logsumexp(-1).mean() / 30
    return 0.5 * loss / len(model.model.layers)


def by_hand(model, logits, labels, hidden, ids):
    some, wanted = logits[..., :-1, :].contiguous().float(), labels[..., 1:].contiguous().to(logits.device)
    return torch.nn.CrossEntropyLoss()(some.view(-1, model.config.vocab_size), wanted.view(-1))


def padded_by_hand(model, logits, labels, hidden, ids):
    wanted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.transpose(1, 2), wanted)


PLAIN = [plus_and_times, by_hand, padded_by_hand]


def loss_of(computes, **held):
    """What is found of a Llama's loss."""
    return layer_stack_of(llama(computes, **held)).loss


def llama(computes, **held):
    class Own(LlamaForCausalLM):
        def forward(self, input_ids=None, labels=None, **kwargs):
            hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
            logits = self.lm_head(hidden)
            loss = None if labels is None else computes(self, logits, labels, hidden, input_ids)
            return CausalLMOutputWithPast(loss=loss, logits=logits)

    for name, value in held.items():
        setattr(Own, name, value)
    with init_empty_weights():
        return Own._from_config(tiny.config("llama"))


@pytest.mark.parametrize("computes", OWN)
def test_its_own_code_computes_it(computes):
    loss = loss_of(computes)
    assert loss.another.startswith("it has a loss of its own")
    assert loss.labels is not None
    assert loss.labels.moved


@pytest.mark.parametrize("computes", OF_FUNCTION)
def test_what_is_made_of_the_functions_loss(computes):
    assert "loss" in loss_of(computes).another


@pytest.mark.parametrize("computes", PLAIN)
def test_plain_ones(computes):
    assert loss_of(computes) == LossForm()


def test_another_one_for_batches_of_a_run_alone():
    def at_100_tokens(model, logits, labels, hidden, ids):
        loss = by_function(model, logits, labels)
        return loss.exp() if ids.shape[1] == 100 else loss

    def of_5_rows(model, logits, labels, hidden, ids):
        return shifted(logits, labels, label_smoothing=0.1 if len(ids) == 5 else 0.0)

    for computes, batch, length in ((at_100_tokens, 2, 100), (of_5_rows, 5, 32)):
        model = llama(computes)
        structure = layer_stack_of(model)
        assert structure.loss == LossForm()
        assert why_another_at(model, structure, 2, 32) == ""
        assert why_another_at(model, structure, batch, length).startswith("it has a loss of its own")


def test_a_property_of_the_class():
    """It can't be set, as transformers' can."""

    def smoothed(self):
        return lambda logits, labels, **kwargs: shifted(logits, labels, label_smoothing=0.1)

    assert loss_of(lambda model, logits, labels, *_: by_function(model, logits, labels)) == LossForm()
    own = loss_of(
        lambda model, logits, labels, *_: by_function(model, logits, labels), loss_function=property(smoothed)
    )
    assert own.labels == MOVED


def test_a_function_with_numbers_of_its_own():
    """``ForCausalLMLoss``, and not as it is."""

    def without(self, *args, **kwargs):
        return ForCausalLMLoss(*args, **kwargs, ignore_index=70)

    own = loss_of(lambda model, logits, labels, *_: by_function(model, logits, labels), loss_function=without)
    assert own.labels == LossLabels(moved=True, ignored=False)  # of -100 it knows nothing


class LeavesTerm(LlamaMLP):
    def forward(self, x):
        self.term = x.square().mean()
        return super().forward(x)


def test_terms_that_layers_leave_for_the_end():
    def with_layers(self, config):
        LlamaForCausalLM.__init__(self, config)
        for layer in self.model.layers:
            layer.mlp = LeavesTerm(config)

    def with_terms(model, logits, labels, hidden, ids):
        return by_function(model, logits, labels) + sum(layer.mlp.term for layer in model.model.layers)

    def with_terms_by_hand(model, logits, labels, hidden, ids):
        return shifted(logits, labels) + sum(layer.mlp.term for layer in model.model.layers)

    assert loss_of(with_terms, __init__=with_layers) == LossForm()
    assert loss_of(with_terms_by_hand, __init__=with_layers).labels == MOVED
