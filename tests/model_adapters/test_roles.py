"""Roles of the families that are known, by hand-made adapter or by HF's own plan."""

from collections import Counter

import pytest
import torch
from transformers import LlamaForCausalLM

from megasched.definition.build import build_definition
from megasched.language.roles import ROLES
from megasched.model_adapters.registry import has_roles, roles_of
from tests import tiny

LAYERS = 4
GATED = {
    "embed.tokens": 1,
    "head": 1,
    **dict.fromkeys(("qkv.q", "qkv.k", "qkv.v", "attn.out", "mlp.gate", "mlp.up", "mlp.down"), LAYERS),
}
ROLES_OF = {
    "llama": GATED,
    "mistral": GATED,
    "qwen2": GATED,
    "qwen3": GATED,
    "gemma2": GATED,
    "phi3": {
        "embed.tokens": 1,
        "head": 1,
        **dict.fromkeys(("qkv.packed", "attn.out", "mlp.gate_up", "mlp.down"), LAYERS),
    },
    "gpt2": {
        "embed.tokens": 1,
        "embed.positions": 1,
        "head": 1,
        **dict.fromkeys(("qkv.packed", "attn.out", "mlp.up", "mlp.down"), LAYERS),
    },
    "opt": {
        "embed.tokens": 1,
        "embed.positions": 1,
        "head": 1,
        **dict.fromkeys(("qkv.q", "qkv.k", "qkv.v", "attn.out", "mlp.up", "mlp.down"), LAYERS),
    },
    "gpt_neox": {
        "embed.tokens": 1,
        "head": 1,
        **dict.fromkeys(("qkv.packed", "attn.out", "mlp.up", "mlp.down"), LAYERS),
    },
}


@pytest.fixture(params=ROLES_OF)
def family(request):
    return request.param


@pytest.fixture
def definition(family):
    return build_definition(tiny.config(family))


def test_every_family_of_the_tests_is_here():
    assert set(ROLES_OF) == set(tiny.FAMILIES)


def test_roles_and_how_many_of_each(family, definition):
    assert Counter(roles_of(definition).role.values()) == ROLES_OF[family]


def test_adapters_are_made_by_hand_where_hfs_plan_does_not_do(family):
    assert has_roles(family) == (family in ("phi3", "gpt2", "opt", "gpt_neox"))


def test_every_matrix_of_the_blocks_has_a_role(definition):
    """What is left whole are norms and what is no matrix of a block."""
    role = roles_of(definition).role
    whole = [
        path
        for path, module in definition.named_modules()
        if getattr(module, "weight", None) is not None and module.weight.dim() == 2 and path not in role
    ]
    assert whole == []


def test_heads_are_counted_as_the_config_counts_them(family, definition):
    roles = roles_of(definition)
    config = definition.config
    keys = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    for path, count in roles.heads.items():
        queries = roles.role[path] in ("qkv.q", "attn.out")
        assert count == (config.num_attention_heads if queries else keys), path
    assert {roles.role[path] for path in roles.heads} == {
        name for name in ROLES_OF[family] if name.startswith(("qkv", "attn"))
    }


def test_components_add_up_to_what_they_are_of(definition):
    for path, sizes in roles_of(definition).components.items():
        assert sum(sizes) in definition.get_submodule(path).weight.shape, path


def test_packed_sizes():
    components = roles_of(build_definition(tiny.config("phi3"))).components
    assert components["model.layers.0.self_attn.qkv_proj"] == (32, 16, 16)
    assert components["model.layers.3.mlp.gate_up_proj"] == (48, 48)
    components = roles_of(build_definition(tiny.config("gpt2"))).components
    assert set(components.values()) == {(32, 32, 32)}
    assert len(components) == LAYERS
    assert (
        roles_of(build_definition(tiny.config("gpt_neox"))).components == {}
    )  # head by head: it is cut as it lies


def test_attributes_that_count_are_there(definition):
    for path, names in roles_of(definition).local_attributes.items():
        module = definition.get_submodule(path)
        for name in names:
            owner = module.config if name.startswith("config.") else module
            assert isinstance(getattr(owner, name.removeprefix("config.")), int), (path, name)


def test_every_role_has_its_cut():
    assert {name for roles in ROLES_OF.values() for name in roles} <= set(ROLES)
    assert set(ROLES.values()) == {"column", "row", "vocab", "features", None}


class Unnamed(LlamaForCausalLM):
    """Has an embedding of tokens under a name of its own, which transformers does not find."""

    def __init__(self, config):
        super().__init__(config)
        self.model.wte = self.model.embed_tokens
        del self.model.embed_tokens


def test_an_embedding_that_the_class_does_not_name_stays_whole_and_is_told():
    """It ended in transformers' NotImplementedError."""
    with torch.device("meta"):
        model = Unnamed(tiny.config("llama"))
    roles = roles_of(model)
    assert not {"embed.tokens", "head"}.intersection(roles.role.values())
    assert set(roles.declined) == {"model.wte", "lm_head"}
    assert "get_input_embeddings of Unnamed does not find" in roles.declined["model.wte"]
