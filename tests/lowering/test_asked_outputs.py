"""What a call of a built model asks for beside logits: whole hidden states and attentions, or a refusal."""

import copy

import pytest
import torch

import megasched
from megasched import ScheduleError
from megasched.verify.ranks.pool import init_megatron
from tests.lowering.models import Mlp, tiny_model, token_ids
from tests.lowering.parity import distance


def _attentions():
    init_megatron(tp=2)
    model, ids = tiny_model("llama", output_attentions=True, attn_implementation="eager"), token_ids()
    built = megasched.apply_schedule(copy.deepcopy(model), "auto")
    wanted, found = (each(ids).attentions for each in (model, built))
    return [distance(a, b) for a, b in zip(found, wanted, strict=True)]


def test_attentions_that_were_planned_are_those_of_all_heads(ranks):
    for gaps in ranks.run(2, _attentions):
        assert len(gaps) == 2
        assert max(gaps) < 1e-5


def test_a_process_alone_does_not_leave_attentions_out():
    model, ids = tiny_model("gemma2"), token_ids()
    planned = copy.deepcopy(model)
    planned.config.output_attentions = True
    wanted = model(ids, output_attentions=True).attentions
    with pytest.raises(megasched.ConfigError, match=r"set model\.config\.output_attentions = True before"):
        megasched.build(megasched.create_schedule(model))(ids, output_attentions=True)
    found = megasched.build(megasched.create_schedule(planned))(ids).attentions
    assert len(found) == len(wanted) == 2
    assert max(distance(a, b) for a, b in zip(found, wanted, strict=True)) < 1e-6


def _split_sequences():
    """What a model gives and refuses whose layers see parts of a sequence."""
    init_megatron(tp=2)
    model, ids = tiny_model("mixtral"), token_ids()
    built = megasched.apply_schedule(copy.deepcopy(model), "auto", sequence_parallel=True)
    wanted, found = (each(ids, output_hidden_states=True).hidden_states for each in (model, built))
    words = []
    for given in ({"input_ids": ids[:, :7]}, {"output_router_logits": True}, {"output_attentions": True}):
        with pytest.raises(megasched.ConfigError) as raised:
            built(**{"input_ids": ids} | given)
        words.append(str(raised.value))
    sch = megasched.create_schedule(Mlp(), sequence_parallel=True)
    with pytest.raises(ScheduleError) as refused:
        megasched.build(sch, inputs={"x": torch.ones(1, 2, 8)})
    words.append(refused.value.problems[0].what)
    return [distance(a, b) for a, b in zip(found, wanted, strict=True)], words


def test_hidden_states_are_whole_and_lengths_must_divide(ranks):
    for gaps, (length, router, attentions, module) in ranks.run(2, _split_sequences):
        assert max(gaps) < 1e-5
        assert "TP 2 does not divide a sequence of 7 tokens; pad batches to a multiple of 2" in length
        assert "set model.config.output_router_logits = True before create_schedule" in router
        assert "set model.config.output_attentions = True before create_schedule" in attentions
        assert "sequence parallelism goes by the layers of an HF model, and these were not seen" in module
