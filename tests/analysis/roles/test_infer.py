"""What is inferred of definitions without a plan: roles, packed parts, attributes, and what is declined."""

import re

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from megasched.analysis.find_layer_stack import layer_stack_of
from megasched.analysis.roles.infer import infer_roles
from megasched.definition.build import build_definition
from megasched.definition.small_models.small_models import small_config
from megasched.language.roles import Roles
from megasched.layers import attention
from megasched.model_adapters.generic import read_plan


def inferred(model_type, tp=2, **changes):
    config = small_config(model_type)
    vars(config).update(changes)
    model = build_definition(config)
    attention.enable(model)
    return model, infer_roles(model, read_plan(model), layer_stack_of(model), tp=tp)


def by_pattern(values):
    return {re.sub(r"\.\d+\.", ".*.", path): value for path, value in values.items()}


@pytest.mark.parametrize(
    ("model_type", "attributes"),
    [
        ("gpt_neo", ("num_heads",)),
        ("stablelm", ("num_heads", "num_key_value_heads")),
        ("persimmon", ("num_heads",)),
        ("bloom", ("num_heads",)),
        ("mpt", ("n_heads",)),
        ("xglm", ("embed_dim", "num_heads")),
    ],
)
def test_every_linear_of_a_layer_is_cut_and_its_heads_are_counted(model_type, attributes):
    model, roles = inferred(model_type)
    linears = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert linears <= roles.role.keys()
    assert set(roles.local_attributes.values()) == {attributes}
    assert roles.declined == {}


def test_a_group_of_heads_may_be_all_that_a_rank_has():
    """One group needs no copy where two did: its operations are others, and its shapes as they must be."""
    _, roles = inferred("falcon", new_decoder_architecture=True, num_kv_heads=2)
    assert set(roles.local_attributes.values()) == {("num_heads", "num_kv_heads")}
    assert roles.declined == {}


def test_attention_with_sinks_is_cut():
    """Of the sinks, one for each head, a rank takes those of its own."""
    _, roles = inferred("gpt_oss")
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert by_pattern(roles.role).keys() >= {f"model.layers.*.self_attn.{name}" for name in names}
    assert roles.declined == {}


def test_heads_are_counted_of_a_model_that_has_not_run():
    """BigBird's forward puts another attention in for short inputs, of which a run's model has none yet."""
    _, roles = inferred("big_bird")
    names = ("self.query", "self.key", "self.value", "output.dense")
    layer = "bert.encoder.layer.*.attention"
    assert by_pattern(roles.declined).keys() >= {f"{layer}.{name}" for name in names}
    assert not any(".attention." in path for path in roles.role)


def test_roles_stand_in_the_order_of_the_calls():
    """A set's order is another one in each process, and with it that of records and of what is printed."""
    _, roles = inferred("gpt_neo")
    calls = ["q_proj", "k_proj", "v_proj", "out_proj", "c_fc", "c_proj"]
    found = [path.rpartition(".") for path in roles.role if path.startswith("transformer.h.")]
    assert [name for _, _, name in found] == calls * (len(found) // len(calls))


def test_what_decided_is_told():
    _, roles = inferred("gpt_neo")
    assert by_pattern(roles.origin) == {
        "transformer.wte": "end of every model",
        "lm_head": "end of every model",
        "transformer.h.*.attn.attention.q_proj": "inferred: feeds out_proj",
        "transformer.h.*.attn.attention.k_proj": "inferred: feeds out_proj",
        "transformer.h.*.attn.attention.v_proj": "inferred: feeds out_proj",
        "transformer.h.*.attn.attention.out_proj": "inferred: takes what stems from k_proj, q_proj, v_proj",
        "transformer.h.*.mlp.c_fc": "inferred: feeds c_proj",
        "transformer.h.*.mlp.c_proj": "inferred: takes what stems from c_fc",
    }


def test_a_plan_is_kept_and_only_what_it_lacks_is_added():
    model, roles = inferred("deepseek_v3")
    plan = read_plan(model)
    assert plan.role.items() <= roles.role.items()
    added = by_pattern({path: role for path, role in roles.role.items() if path not in plan.role})
    assert added == {
        "model.layers.*.self_attn.q_b_proj": "column",
        "model.layers.*.self_attn.kv_b_proj": "column",
        "model.layers.*.self_attn.o_proj": "row",
    }
    assert by_pattern(roles.declined) == {
        "model.layers.*.self_attn.q_a_proj": "no other linear was found that it could be cut with",
        "model.layers.*.self_attn.kv_a_proj_with_mqa": "no other linear was found that it could be cut with",
        "model.layers.*.mlp.experts": "HF's plan: model.layers.*.mlp.experts is moe_tp_experts",
    }


@pytest.mark.parametrize(
    ("model_type", "changes", "tp", "heads", "attributes"),
    [
        ("stablelm", {}, 4, 2, ("num_heads", "num_key_value_heads")),
        ("stablelm", {"num_key_value_heads": 1}, 2, 1, ("num_heads",)),
        ("granitemoe", {"num_key_value_heads": 2}, 4, 2, None),
    ],
)
def test_fewer_heads_than_ranks_are_replicated(model_type, changes, tp, heads, attributes):
    _, roles = inferred(model_type, tp=tp, **changes)
    found = {path.rpartition(".")[2]: roles.heads[path] for path in roles.heads}
    assert found == {"k_proj": heads, "v_proj": heads}
    assert roles.role.keys() >= roles.heads.keys()
    assert set(roles.local_attributes.values()) == ({attributes} if attributes else set())
    assert not roles.components.keys() & roles.heads.keys()


def test_one_head_packed_with_those_of_query_is_replicated():
    _, roles = inferred("gpt_bigcode")
    packed = {f"transformer.h.{i}.attn.c_attn" for i in range(4)}
    assert roles.heads == dict.fromkeys(packed, 1)
    assert {roles.components[path] for path in packed} == {(64, 16, 16)}
    assert set(roles.local_attributes.values()) == {("embed_dim",)}
    assert roles.declined == {}


def test_heads_that_ranks_cannot_share_leave_attention_whole():
    _, three = inferred("stablelm", tp=3, num_attention_heads=6, hidden_size=96)
    assert three.heads == {}
    assert "TP 3 does not divide 2 heads" in three.declined["model.layers.0.self_attn.k_proj"]


def test_heads_that_tp_does_not_divide_leave_attention_whole():
    _, two = inferred("gpt_neo", tp=2)
    _, three = inferred("gpt_neo", tp=3)
    attention = "transformer.h.0.attn.attention"
    assert two.role.keys() - three.role.keys() >= {f"{attention}.q_proj", f"{attention}.out_proj"}
    assert three.declined[f"{attention}.q_proj"] == "TP 3 does not divide 4 heads or features of its output"
    assert three.declined[f"{attention}.out_proj"] == "the other side of it stays whole"


class Mixing(nn.Module):
    """Up to two parts, one a gate, and down; and a linear on the residual, which can't be paired."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(6, 8)
        self.odd = nn.Linear(8, 8)

    def forward(self, hidden_states):
        gate, up = self.up(hidden_states).split([6, 6], dim=-1)
        return hidden_states + self.down(gate.sigmoid() * up) + self.odd(hidden_states * 2)


class Toy(nn.Module):
    main_input_name = "input_ids"

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.layers = nn.ModuleList(Mixing() for _ in range(2))
        self.head = nn.Linear(8, 9)

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return CausalLMOutput(logits=self.head(x))


def test_parts_that_lie_side_by_side_are_cut_one_by_one():
    with torch.device("meta"):
        toy = Toy()
        roles = infer_roles(toy, Roles(), layer_stack_of(toy), tp=2)
    assert by_pattern(roles.role) == {"layers.*.up": "column", "layers.*.down": "row"}
    assert by_pattern(roles.components) == {"layers.*.up": (6, 6)}
    assert by_pattern(roles.declined) == {"layers.*.odd": "no other linear was found that it could be cut with"}
