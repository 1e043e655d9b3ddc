"""Logits that stay cut over the vocabulary: their loss, HF's own call of it, and where there are none."""

import copy

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megasched
from megasched import ParallelCrossEntropy, ScheduleError
from megasched.lowering.build import plan_of
from megasched.verify.ranks.pool import init_megatron
from tests.lowering.models import VOCABULARY, tiny_model, token_ids
from tests.lowering.parity import compare_gradients, distance, too_far
from tests.lowering.test_objectives import model_of

IGNORED = -100


class Widest(TorchDispatchMode):
    """Notes the largest last dimension of what operations give."""

    def __init__(self):
        super().__init__()
        self.width = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor) and leaf.dim() > 1]
        self.width = max([self.width, *(tensor.shape[-1] for tensor in tensors)])
        return given


def _stepped(model, loss_of):
    """The loss, and the gradients of a model on it."""
    model.zero_grad()
    loss = loss_of(model)
    loss.backward()
    return loss.detach()


def _of_hf(family, **given):
    init_megatron(tp=2)
    model, ids = tiny_model(family), token_ids()
    labels = ids.clone()
    labels[0, 3:7] = IGNORED
    built = megasched.apply_schedule(copy.deepcopy(model), "auto", parallel_output=True)
    wanted = _stepped(model, lambda model: model(input_ids=ids, labels=labels, **given).loss)
    with Widest() as seen:
        found = _stepped(built, lambda model: model(input_ids=ids, labels=labels, **given).loss)
    gaps = {"loss": distance(found, wanted), **compare_gradients(built, plan_of(built), model)}
    return seen.width < VOCABULARY, too_far(gaps)


@pytest.mark.parametrize(("family", "given"), [("gemma2", {}), ("gpt2", {"num_items_in_batch": 7})])
def test_hfs_own_call_takes_cut_logits(ranks, family, given):
    assert ranks.run(2, _of_hf, family, **given) == [(True, {})] * 2


def _by_hand():
    """A loss of one's own code: the mean, and each label's. Logits are not written to."""
    init_megatron(tp=2)
    model, ids = tiny_model("llama"), token_ids()
    built = megasched.apply_schedule(copy.deepcopy(model), "auto", parallel_output=True)
    logits, whole = built(ids).logits, model(ids).logits
    kept = logits.detach().clone()
    wanted = _stepped(model, lambda model: F.cross_entropy(model(ids).logits[:, :-1].mT, ids[:, 1:]))
    found = _stepped(built, lambda model: ParallelCrossEntropy(VOCABULARY)(model(ids).logits[:, :-1], ids[:, 1:]))
    each = ParallelCrossEntropy(VOCABULARY, reduction="none")
    gaps = {
        "loss": distance(found, wanted),
        **compare_gradients(built, plan_of(built), model),
        "each": distance(each(logits, ids), F.cross_entropy(whole.mT, ids, reduction="none")),
        "of whole logits": distance(each(whole, ids), F.cross_entropy(whole.mT, ids, reduction="none")),
    }
    with pytest.raises(megasched.ConfigError, match="an id is none of the vocabulary, which ends with 98"):
        each(logits, ids.where(ids != ids[0, 0], VOCABULARY))
    with pytest.raises(ValueError, match="50 columns on each of 2 ranks, and vocab_size is 300"):
        ParallelCrossEntropy(300)(logits, ids)
    with pytest.raises(ValueError, match="reduction='average': it is one of mean, sum, none"):
        ParallelCrossEntropy(VOCABULARY, reduction="average")
    return torch.equal(logits, kept), too_far(gaps)


def test_a_loss_of_ones_own_takes_cut_logits(ranks):
    assert ranks.run(2, _by_hand) == [(True, {})] * 2


def _refused():
    init_megatron(tp=2)
    words = []
    for model in (tiny_model("llama"), model_of("t5"), model_of("bert")):
        with pytest.raises(ScheduleError) as raised:
            megasched.build(megasched.create_schedule(model, name=None, parallel_output=True))
        words.append(str(raised.value))
    return words


def test_logits_that_are_not_cut_are_told(ranks):
    for head, *others in ranks.run(2, _refused):
        assert "the schedule does not cut the head by its rows (axis 0)" in head
        assert "build it without parallel_output" in head
        assert all("no causal language model whose loss is transformers' loss_function" in said for said in others)
