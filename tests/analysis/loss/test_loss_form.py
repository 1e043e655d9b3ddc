"""A loss that is not the cross entropy of a definition's logits is seen, by numbers that its own code gives; and
what labels that code takes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from megasched.analysis.find_layer_stack import layer_stack_of
from megasched.analysis.loss.loss_form import find_loss_form
from megasched.analysis.stages.loss_labels import LossForm, LossLabels
from megasched.definition.build import build_definition, init_empty_weights
from megasched.definition.small_models.small_models import small_config
from tests import tiny


class Llama(LlamaForCausalLM):
    """Its forward in the usual form, with one thing about its loss changed."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        logits = self.lm_head(hidden)
        return self.made(logits, None if labels is None else self.of(logits, labels, hidden))

    def made(self, logits, loss):
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    def of(self, logits, labels, hidden):
        return self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)


def shifted(logits, labels, **more):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), **more)


class AddsOfLogits(Llama):
    def of(self, logits, labels, hidden):
        return super().of(logits, labels, hidden) + 1e-2 * logits.float().logsumexp(-1).square().mean()


class AddsOfHidden(Llama):
    def of(self, logits, labels, hidden):
        return super().of(logits, labels, hidden) + 1e-2 * hidden.square().mean()


class ByHand(Llama):
    def of(self, logits, labels, hidden):
        return shifted(logits, labels)


class WritesToOutputs(Llama):
    """In place, as code may do with what a module has just given it."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state.mul_(0.5)
        logits = self.lm_head(hidden).div_(2)
        return self.made(logits, None if labels is None else shifted(logits, labels))


class OfTheSamePlaces(Llama):
    """As decoders of encoder-decoders have it: labels are shifted by whoever makes them."""

    def of(self, logits, labels, hidden):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Capped(Llama):
    def made(self, logits, loss):
        return super().made(logits, loss)

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = torch.tanh(self.lm_head(self.model(input_ids=input_ids, **kwargs).last_hidden_state))
        return self.made(logits, None if labels is None else self.of(logits, labels, None))


class TiedByFunction(Llama):
    """Logits by the table of the embedding, as some definitions' code has it."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        logits = F.linear(hidden, self.model.embed_tokens.weight)
        return self.made(logits, None if labels is None else self.of(logits, labels, hidden))


class AddsOfWeights(Llama):
    def of(self, logits, labels, hidden):
        return super().of(logits, labels, hidden) + 1e-3 * self.lm_head.weight.square().mean()


class Twice(Llama):
    def of(self, logits, labels, hidden):
        return super().of(logits, labels, hidden) + 0.3 * super().of(self.lm_head(2 * hidden), labels, hidden)


class NoLoss(Llama):
    def of(self, logits, labels, hidden):
        return None


class Smoothed(Llama):
    def of(self, logits, labels, hidden):
        return shifted(logits, labels, label_smoothing=0.1)


class LeavesOut(Llama):
    """Ids below 3 are not learned."""

    def of(self, logits, labels, hidden):
        return shifted(logits, labels.masked_fill(labels < 3, -100))


class LeavesOutByFunction(Llama):
    def of(self, logits, labels, hidden):
        return super().of(logits, labels.masked_fill(labels < 3, -100), hidden)


class PlusPenalty(Llama):
    """By hand, with a term."""

    def of(self, logits, labels, hidden):
        return shifted(logits, labels) + 1e-4 * logits.square().mean()


class AnotherGradient(Llama):
    """The value is the cross entropy's, the gradient is not."""

    def of(self, logits, labels, hidden):
        loss = shifted(logits, labels)
        return 2 * loss - loss.detach()


class NextButOne(Llama):
    def of(self, logits, labels, hidden):
        return F.cross_entropy(logits[:, :-2].flatten(0, 1), labels[:, 2:].flatten())


class FunctionOfItsOwn(Llama):
    def loss_function(self, logits, labels, vocab_size, **kwargs):
        return shifted(logits, labels, label_smoothing=0.1)


class Weighted(Llama):
    def of(self, logits, labels, hidden):
        weights = torch.linspace(0.5, 1.5, logits.shape[-1], device=logits.device)
        return shifted(logits, labels, weight=weights)


class SmoothedOfTheSamePlaces(Llama):
    def of(self, logits, labels, hidden):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


class TwoHeads(Llama):
    """The second looks for the label after the next, too."""

    def of(self, logits, labels, hidden):
        after_next = F.cross_entropy(self.lm_head(2 * hidden)[:, :-2].flatten(0, 1), labels[:, 2:].flatten())
        return super().of(logits, labels, hidden) + 0.3 * after_next


class LeavesOutTheFirst(Llama):
    def of(self, logits, labels, hidden):
        return shifted(logits[:, 4:], labels[:, 4:])


class OneHot(Llama):
    """A label of -100 fails."""

    def of(self, logits, labels, hidden):
        wanted = 0.9 * F.one_hot(labels[:, 1:], logits.shape[-1])
        return -(wanted * logits[:, :-1].log_softmax(-1)).sum(-1).mean()


class Clamped(Llama):
    """A label of -100 is taken for one of 0."""

    def of(self, logits, labels, hidden):
        return shifted(logits, labels.clamp(min=0), label_smoothing=0.1)


class Wrapped(Llama):
    """A label of -100 is taken for another."""

    def of(self, logits, labels, hidden):
        return shifted(logits, labels % logits.shape[-1], label_smoothing=0.1)


class Summed(Llama):
    """Labels of -100 are left out, and the sum does not tell how many."""

    def of(self, logits, labels, hidden):
        return shifted(logits, labels, reduction="sum")


class FewerLabels(Llama):
    """As GIT, whose first positions are those of a picture."""

    def of(self, logits, labels, hidden):
        return F.cross_entropy(logits[:, 3:-1].flatten(0, 1), labels[:, 1:].flatten())


class OfEachLabel(Llama):
    def of(self, logits, labels, hidden):
        return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


class Rolled(Llama):
    """The last position is to predict the first label, which a run does not have."""

    def of(self, logits, labels, hidden):
        return F.cross_entropy(logits.flatten(0, 1), labels.roll(-1, 1).flatten(), label_smoothing=0.1)


class Shifts(LlamaForCausalLM):
    """It takes labels that others have moved already, beside those that it moves."""

    def forward(self, input_ids=None, labels=None, shift_labels=None, **kwargs):
        hidden, loss = self.model(input_ids=input_ids, **kwargs).last_hidden_state, None
        logits = self.lm_head(hidden)
        if labels is not None:
            moved = F.pad(labels, (0, 1), value=-100)[:, 1:] if shift_labels is None else shift_labels
            loss = self.of(logits, labels, moved.flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    def of(self, logits, labels, moved):
        return F.cross_entropy(logits.flatten(0, 1), moved, label_smoothing=0.1)


class ShiftsTwice(Shifts):
    """A second loss by those that it moves itself."""

    def of(self, logits, labels, moved):
        return super().of(logits, labels, moved) + 0.3 * F.cross_entropy(
            logits[:, :-2].flatten(0, 1), labels[:, 2:].flatten()
        )


class ShiftsAndCounts(Shifts):
    """Over all labels, also those that do not count."""

    def of(self, logits, labels, moved):
        return F.cross_entropy(logits.flatten(0, 1), moved.clamp(min=0), label_smoothing=0.1)


class TwoCalls(LlamaForCausalLM):
    """Of transformers' function, which gets both."""

    def forward(self, input_ids=None, labels=None, shift_labels=None, **kwargs):
        hidden, loss = self.model(input_ids=input_ids, **kwargs).last_hidden_state, None
        logits = self.lm_head(hidden)
        if labels is not None:
            given = {"labels": labels, "vocab_size": self.config.vocab_size, "shift_labels": shift_labels}
            loss = self.loss_function(logits=logits, **given) + 0.3 * self.loss_function(logits=-logits, **given)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class Edits(LlamaForCausalLM):
    """What it leaves out of the labels, ``shift_labels`` have."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        if labels is not None:
            labels = labels.masked_fill(labels % 5 == 3, -100)
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)


class NeedsShifted(LlamaForCausalLM):
    """Its function goes by nothing else."""

    def loss_function(self, logits=None, labels=None, vocab_size=None, shift_labels=None, **kwargs):
        return F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), label_smoothing=0.1)


class GivesDict(Llama):
    def made(self, logits, loss):
        return {"logits": logits, "loss": loss}


class GivesTuple(Llama):
    def made(self, logits, loss):
        return (loss, logits)


class ReadsWeights(Llama):
    """Of what a trial has no numbers."""

    def of(self, logits, labels, hidden):
        return shifted(logits, labels) + 1e-3 * self.lm_head.weight.square().mean()


def made(cls):
    with init_empty_weights():
        return cls._from_config(tiny.config("llama"))


def found(cls):
    return layer_stack_of(made(cls)).loss


SAME = [
    LlamaForCausalLM,
    Llama,
    AddsOfLogits,
    AddsOfHidden,
    Capped,
    TiedByFunction,
    AddsOfWeights,
    ByHand,
    WritesToOutputs,
]


@pytest.mark.parametrize("cls", [*SAME, OfTheSamePlaces, NoLoss])
def test_a_run_computes_the_same(cls):
    assert found(cls) == LossForm()


MOVED = [Smoothed, LeavesOut, LeavesOutByFunction, PlusPenalty, AnotherGradient, NextButOne, ReadsWeights]


@pytest.mark.parametrize(
    ("cls", "labels"),
    [
        *((cls, LossLabels(True, True)) for cls in (*MOVED, FunctionOfItsOwn, TwoHeads, LeavesOutTheFirst, Twice)),
        *((cls, LossLabels(True, False)) for cls in (OneHot, Clamped, Wrapped, Summed, Weighted)),
        (SmoothedOfTheSamePlaces, LossLabels(False, True)),
        (FewerLabels, LossLabels(True, True, 3)),
        *((cls, LossLabels(False, True, shifted=True)) for cls in (Shifts, ShiftsTwice, TwoCalls, NeedsShifted)),
        (ShiftsAndCounts, LossLabels(False, False, shifted=True)),
    ],
)
def test_a_loss_of_its_own_and_its_labels(cls, labels):
    loss = found(cls)
    assert loss.labels == labels
    twice = cls in (Twice, TwoCalls)
    assert loss.another.startswith("its forward asks for 2" if twice else "it has a loss of its own")


def test_two_ways_to_hand_over_labels_that_come_to_two_losses_are_refused():
    loss = found(Edits)
    assert loss.labels is None
    assert loss.another.endswith("it is another one with shift_labels than with labels alone")


@pytest.mark.parametrize("cls", [OfEachLabel, Rolled])
def test_labels_that_cannot_be_told(cls):
    loss = found(cls)
    assert loss.labels is None
    assert loss.another.endswith("can't be told by trying it")


@pytest.mark.parametrize(("cls", "name"), [(GivesDict, "dict"), (GivesTuple, "tuple")])
def test_a_forward_that_gives_something_else(cls, name):
    loss = found(cls)
    assert f"its forward returns a {name}" in loss.another
    assert loss.labels is None


@pytest.mark.parametrize(
    ("model_type", "labels"), [("prophetnet", LossLabels(False, True)), ("git", LossLabels(True, True, 5))]
)
def test_stock_classes_that_have_one(model_type, labels):
    structure = layer_stack_of(build_definition(small_config(model_type)))
    assert structure.loss.labels == labels
    assert structure.trial_inputs()["labels"].shape[1] == max(5 - labels.skipped, 0)


def test_the_definition_stays_as_it_is():
    model = made(Llama)
    before = dict(vars(model))
    find_loss_form(model, layer_stack_of(model))
    assert vars(model) == before
    assert all(isinstance(parameter, nn.Parameter) and parameter.is_meta for parameter in model.parameters())
