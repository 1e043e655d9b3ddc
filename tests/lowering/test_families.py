"""Every family under the schedule `auto`, against itself unscheduled in one process."""

import pytest
import torch

from megasched.model_adapters.default_schedule import schedule
from tests.lowering.models import tiny_model, token_ids
from tests.lowering.parity import compare, distance, scheduled_copy, too_far
from tests.rank_pool import init_megatron
from tests.tiny import FAMILIES


def _auto(sch):
    schedule(sch, sch.layout)


def _gaps(family, **changes):
    ids = token_ids()
    return too_far(compare(tiny_model(family, **changes), _auto, {"input_ids": ids, "labels": ids}))


def _at_tp2(family):
    init_megatron(tp=2)
    return _gaps(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_every_gradient_at_tp2(ranks, family):
    assert ranks.run(2, _at_tp2, family) == [{}, {}]


def _padding_and_masks():
    """A batch with padding, as a library user has it: logits of the real positions."""
    init_megatron(tp=2)
    found = {}
    for family in ("mistral", "gemma2", "gpt2"):
        model = tiny_model(family)
        built, _, _ = scheduled_copy(model, _auto)
        ids = token_ids()
        mask = torch.ones_like(ids)
        mask[0, :5] = 0
        logits = [each(input_ids=ids, attention_mask=mask).logits for each in (built, model)]
        found[family] = distance(*(each[mask.bool()] for each in logits))
    return found


def test_a_padding_mask_is_applied(ranks):
    for found in ranks.run(2, _padding_and_masks):
        assert too_far(found) == {}


def _four_ranks():
    """Fewer heads of k and v than ranks; a vocabulary padded by one row on the last rank."""
    init_megatron(tp=4)
    return {
        "llama": _gaps("llama"),
        "llama with biases": _gaps("llama", attention_bias=True, mlp_bias=True),
        "qwen3": _gaps("qwen3"),
        "gpt_neox": _gaps("gpt_neox"),
    }


def test_kv_heads_fewer_than_ranks_at_tp4(ranks):
    for found in ranks.run(4, _four_ranks):
        assert found == {"llama": {}, "llama with biases": {}, "qwen3": {}, "gpt_neox": {}}


def _replicated():
    init_megatron(tp=4)
    built, plan, _ = scheduled_copy(tiny_model("llama"), _auto)
    k = built.model.layers[0].self_attn.k_proj
    placement = plan.placements["model.layers.0.self_attn.k_proj.weight"]
    return type(k).__name__, k.head, tuple(k.weight.shape), placement.sharded, placement.tp_gradient


def test_replicated_heads_are_used_as_megatron_assigns_them(ranks):
    found = ranks.run(4, _replicated)
    assert found == [("ReplicatedHeadsLinear", head, (16, 32), False, "partial") for head in (0, 0, 1, 1)]


def _partial_gradients():
    init_megatron(tp=2)
    _, plan, _ = scheduled_copy(tiny_model("qwen3"), _auto)
    return sorted(name for name, p in plan.placements.items() if p.tp_gradient == "partial")


def test_gradients_to_be_summed_are_those_of_the_head_norms(ranks):
    norms = [f"model.layers.{i}.self_attn.{qk}_norm.weight" for i in range(2) for qk in "kq"]
    assert ranks.run(2, _partial_gradients) == [norms, norms]


def _frozen():
    init_megatron(tp=2)
    model = tiny_model("qwen3")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" not in name and "mlp" not in name)
    ids = token_ids()
    built, _, _ = scheduled_copy(model, _auto)
    kept = {n: p.requires_grad for n, p in built.named_parameters()} == {
        n: p.requires_grad for n, p in model.named_parameters()
    }
    return kept, too_far(compare(model, _auto, {"input_ids": ids, "labels": ids}))


def test_frozen_parameters_stay_frozen(ranks):
    assert ranks.run(2, _frozen) == [(True, {}), (True, {})]


def _partly():
    """Schedules that leave something out: what is needed then is derived."""
    init_megatron(tp=2)
    ids = token_ids()
    calls = {"input_ids": ids, "labels": ids}
    schedules = {
        "no output projection": lambda sch: sch["**.[qkv]_proj"].shard("weight", axis=0),
        "one column of three": lambda sch: sch["**.q_proj"].shard("weight", axis=0),
        "rows only": lambda sch: [sch["**.o_proj"].shard("weight", 1), sch["**.down_proj"].shard("weight", 1)],
        "gate without up": lambda sch: [
            sch["**.gate_proj"].shard("weight", 0),
            sch["**.down_proj"].shard("weight", 1),
        ],
        "head only": lambda sch: sch["lm_head"].shard("weight", axis=0),
        "embedding only": lambda sch: sch["model.embed_tokens"].shard("weight", axis=0),
        "one layer": lambda sch: sch["model.layers.1.mlp"]["[ud]*_proj"].shard("weight", axis=0),
    }
    return {name: too_far(compare(tiny_model("llama"), fill, calls)) for name, fill in schedules.items()}


def test_what_is_left_out_is_gathered_and_cut_where_needed(ranks):
    for found in ranks.run(2, _partly):
        assert {name: gaps for name, gaps in found.items() if gaps} == {}
