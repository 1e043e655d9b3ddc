"""Every family under the schedule `auto`, against itself unscheduled in one process."""

import pytest
import torch

from megasched.verify.ranks.pool import init_megatron
from tests import tiny
from tests.lowering.models import auto, randomize, tiny_model, token_ids
from tests.lowering.parity import compare, distance, scheduled_copy, too_far
from tests.tiny import FAMILIES


def _gaps(family, **changes):
    ids = token_ids()
    return too_far(compare(tiny_model(family, **changes), auto, {"input_ids": ids, "labels": ids}))


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
        built, _, _ = scheduled_copy(model, auto)
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
        "phi3": _gaps("phi3"),
        "phi3, one head": _gaps("phi3", num_key_value_heads=1),
    }


def test_kv_heads_fewer_than_ranks_at_tp4(ranks):
    for found in ranks.run(4, _four_ranks):
        assert [name for name, gaps in found.items() if gaps] == []


def _one_head(family):
    init_megatron(tp=2)
    _, plan, _ = scheduled_copy(tiny_model(family, num_key_value_heads=1), auto)
    return sorted(plan.tp_facts.gather), len(plan.replicated_heads), _gaps(family, num_key_value_heads=1)


@pytest.mark.parametrize(("family", "projections"), [("llama", 4), ("phi3", 2), ("qwen3", 4), ("gemma2", 4)])
def test_one_head_of_key_and_value_gathers_nothing(ranks, family, projections):
    assert ranks.run(2, _one_head, family) == [(["lm_head"], projections, {})] * 2


def _replicated():
    init_megatron(tp=4)
    built, plan, _ = scheduled_copy(tiny_model("llama"), auto)
    k = built.model.layers[0].self_attn.k_proj
    placement = plan.placements["model.layers.0.self_attn.k_proj.weight"]
    return type(k).__name__, k.rows, tuple(k.weight.shape), placement.sharded, placement.tp_gradient


def test_replicated_heads_are_used_as_megatron_assigns_them(ranks):
    found = ranks.run(4, _replicated)
    assert found == [
        ("ReplicatedHeadsLinear", ((8 * head, 8 * head + 8),), (16, 32), False, "partial") for head in (0, 0, 1, 1)
    ]


VARIANTS = {
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "opt with projections, norms after": ("opt", {"word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "gpt_neox in sequence": ("gpt_neox", {"use_parallel_residual": False, "tie_word_embeddings": True}),
    "gpt2 with scales": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
}
# By HF's plan alone: gate and up packed (which HF gathers), norms over all heads at once.
PLANNED = {
    "glm4": {"head_dim": 8, "pad_token_id": 0},
    "olmo2": {"pad_token_id": 0},
    "cohere": {"pad_token_id": 0, "use_qk_norm": True},
}


def _variants():
    from transformers import AutoConfig, AutoModelForCausalLM

    init_megatron(tp=2)
    found = {name: _gaps(family, **changes) for name, (family, changes) in VARIANTS.items()}
    ids = token_ids()
    for family, changes in PLANNED.items():
        config = AutoConfig.for_model(family, **{**tiny.FAMILIES["qwen3"], "num_hidden_layers": 2, **changes})
        model = randomize(AutoModelForCausalLM.from_config(config, dtype=torch.float32)).train()
        found[family] = too_far(compare(model, auto, {"input_ids": ids, "labels": ids}))
    return found


def test_variants_and_families_without_an_adapter(ranks):
    for found in ranks.run(2, _variants):
        assert found == {name: {} for name in (*VARIANTS, *PLANNED)}


def _partial_gradients():
    init_megatron(tp=2)
    _, plan, _ = scheduled_copy(tiny_model("qwen3"), auto)
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
    built, _, _ = scheduled_copy(model, auto)
    kept = {n: p.requires_grad for n, p in built.named_parameters()} == {
        n: p.requires_grad for n, p in model.named_parameters()
    }
    return kept, too_far(compare(model, auto, {"input_ids": ids, "labels": ids}))


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


def _gathered_heads():
    """The user wants k whole, which has fewer heads than there are ranks: q and v follow."""
    init_megatron(tp=4)
    ids = token_ids()

    def fill(sch):
        auto(sch)
        sch["**.k_proj"].sync("fwd_post", "all_gather")

    _, plan, _ = scheduled_copy(tiny_model("qwen3"), fill)
    gaps = too_far(compare(tiny_model("qwen3"), fill, {"input_ids": ids, "labels": ids}))
    return plan.replicated_heads, gaps, sorted(n for n in plan.tp_facts.gather if n.startswith("model.layers.0"))


def test_heads_that_are_gathered_are_not_replicated(ranks):
    projections = [f"model.layers.0.self_attn.{qkv}_proj" for qkv in "kqv"]
    assert ranks.run(4, _gathered_heads) == [({}, {}, projections)] * 4


def _gathers():
    """Columns whose output is gathered, and rows that cut their input, by family."""
    init_megatron(tp=2)
    found = {}
    for family in FAMILIES:
        _, plan, _ = scheduled_copy(tiny_model(family), auto)
        found[family] = (set(plan.tp_facts.gather), plan.tp_facts.scatter)
    return found


def test_nothing_but_the_logits_is_gathered(ranks):
    for found in ranks.run(2, _gathers):
        for family, (gather, scatter) in found.items():
            assert gather == {"lm_head"}, family
            assert scatter == set(), family


def _attention_of_mixtral():
    """Experts stay whole on every rank."""
    from transformers import AutoConfig, AutoModelForCausalLM

    init_megatron(tp=2)
    sizes = {
        "num_local_experts": 4,
        "num_hidden_layers": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = AutoConfig.for_model("mixtral", **{**tiny.FAMILIES["llama"], **sizes})
    model = randomize(AutoModelForCausalLM.from_config(config, dtype=torch.float32)).train()

    def fill(sch):
        for attention in sch["model.layers.*.self_attn"]:
            for name in "qkv":
                attention[f"{name}_proj"].shard("weight", axis=0)
            attention["o_proj"].shard("weight", axis=1)

    ids = token_ids()
    return too_far(compare(model, fill, {"input_ids": ids, "labels": ids}))


def test_the_attention_of_a_model_with_experts(ranks):
    assert ranks.run(2, _attention_of_mixtral) == [{}, {}]
