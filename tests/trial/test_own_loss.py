"""A loss that is not the cross entropy of a definition's logits is seen, by numbers that its own code gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from megasched.definition import build_definition, init_empty_weights
from megasched.trial.own_loss import OwnLoss, own_loss
from megasched.trial.structure import structure_of
from megasched.verify.small_models import small_config
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
    model = made(cls)
    return own_loss(model, structure_of(model))


@pytest.mark.parametrize(
    ("cls", "calls"),
    [
        *((LlamaForCausalLM, 1), (Llama, 1), (AddsOfLogits, 1), (AddsOfHidden, 1), (Capped, 1), (Twice, 2)),
        *((TiedByFunction, 1), (AddsOfWeights, 1)),
        *((ByHand, 0), (OfTheSamePlaces, 0), (NoLoss, 0)),
    ],
)
def test_a_run_computes_the_same(cls, calls):
    assert found(cls) == OwnLoss("", calls)


OTHER = [
    Smoothed,
    LeavesOut,
    LeavesOutByFunction,
    PlusPenalty,
    AnotherGradient,
    NextButOne,
    Weighted,
    ReadsWeights,
]


@pytest.mark.parametrize("cls", [*OTHER, FunctionOfItsOwn, ReadsWeights])
def test_a_loss_of_its_own(cls):
    assert found(cls).why_another.startswith("it has a loss of its own")


@pytest.mark.parametrize(("cls", "name"), [(GivesDict, "dict"), (GivesTuple, "tuple")])
def test_a_forward_that_gives_something_else(cls, name):
    assert f"its forward returns a {name}" in found(cls).why_another


def test_prophetnet_has_one():
    model = build_definition(small_config("prophetnet"))
    assert own_loss(model, structure_of(model)).why_another.endswith("not the cross entropy of its logits")


def test_the_definition_stays_as_it_is():
    model = made(Llama)
    before = dict(vars(model))
    own_loss(model, structure_of(model))
    assert vars(model) == before
    assert all(isinstance(parameter, nn.Parameter) and parameter.is_meta for parameter in model.parameters())
