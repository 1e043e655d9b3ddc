"""Weights of models with replacements and adapters, by the definition's names: saved, resumed, filled late."""

import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import megasched
from megasched import CheckpointError, ConfigError, HFFolder, RandomInit
from megasched.verify.ranks.pool import init_megatron
from tests.dialects.steps import adamw
from tests.language.replacing import Around, Scale
from tests.lowering.models import VOCABULARY, tiny_config, tiny_model, token_ids

IDS = token_ids()


class Norm(nn.Module):
    """Llama's, whose weight has another name."""

    def __init__(self, old):
        super().__init__()
        self.gain, self.eps = nn.Parameter(torch.empty_like(old.weight)), old.variance_epsilon

    def forward(self, x):
        return nn.functional.rms_norm(x, self.gain.shape, self.gain, self.eps)


def wrap(sch):
    """Around what is cut, around both sides of a tie, and a norm of another name."""
    sch["model.layers.*.mlp"].replace(Around)
    sch["model.embed_tokens"].replace(Around)
    sch["lm_head"].replace(Around)
    sch["model.norm"].replace(Norm, weights={"gain": "weight"})


def adapt(sch):
    sch["**.*_proj"].adapt(rank=4, alpha=8)
    sch["model.norm"].unfreeze()


def adapt_packed(sch):
    sch["**.c_attn"].adapt(rank=4)
    sch["**.c_proj"].adapt(rank=4)


def _adapters_with_numbers(model):
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            nn.init.constant_(parameter, 0.1)
    return model


def _built(model, fill=lambda sch: None, staged=False):
    sch = megasched.create_schedule(model, name="auto")
    fill(sch)
    return _adapters_with_numbers(megasched.build_stage(sch) if staged else megasched.build(sch))


def _saved(folder, family, fill, changes):
    from transformers import AutoModelForCausalLM

    init_megatron(tp=2)
    model = _built(tiny_model(family, **changes), fill)
    megasched.save_pretrained(model, folder)
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    torch.testing.assert_close(loaded(input_ids=IDS).logits, model(input_ids=IDS).logits, rtol=1e-5, atol=1e-5)
    return len(info["missing_keys"]), len(info["unexpected_keys"])


@pytest.mark.parametrize(
    ("family", "fill", "changes"),
    [
        ("llama", wrap, {}),
        ("llama", wrap, {"tie_word_embeddings": True}),
        ("llama", adapt, {}),
        ("gpt2", adapt_packed, {}),
    ],
)
def test_a_folder_is_of_the_model(ranks, tmp_path, family, fill, changes):
    assert ranks.run(2, _saved, str(tmp_path / "saved"), family, fill, changes) == [(0, 0)] * 2


def _stages(folder):
    from transformers import AutoModelForCausalLM

    init_megatron(pp=2)
    megasched.save_pretrained(_built(tiny_model("gpt2"), adapt_packed, staged=True), folder)
    whole = _adapters_with_numbers(megasched.build(_adapted_alone(tiny_model("gpt2"))))
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(loaded(input_ids=IDS).logits, whole(input_ids=IDS).logits, rtol=1e-5, atol=1e-5)


def _adapted_alone(model):
    sch = megasched.create_schedule(model, megasched.ParallelDims())
    adapt_packed(sch)
    return sch


def test_stages_with_adapters(ranks, tmp_path):
    ranks.run(2, _stages, str(tmp_path / "saved"))


@pytest.mark.parametrize(
    ("weights", "more", "what"),
    [
        ({"gain": lambda old: old["weight"] + 1}, {}, "model.norm.gain, model.norm.weight"),
        ({"gain": lambda old: torch.ones(64)}, {"drop": ("weight",)}, "model.norm.gain, model.norm.weight"),
    ],
)
def test_weights_that_the_definition_does_not_have(tmp_path, weights, more, what):
    model = tiny_model("llama", hidden_size=64)
    built = _built(model, lambda sch: sch["model.norm"].replace(lambda old: Scale(64), weights=weights, **more))
    with pytest.raises(ConfigError, match=f"a replacement drops {what} or makes it anew"):
        megasched.save_pretrained(built, tmp_path / "saved")
    assert not os.listdir(tmp_path)
    assert "model.norm.gain" in megasched.full_state_dict(built)


@pytest.mark.parametrize("tied", [False, True])
def test_whole_tensors_have_the_definitions_names(tied):
    model = tiny_model("llama", tie_word_embeddings=tied)
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = megasched.full_state_dict(_built(model, wrap))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def _checkpoint(folder, fill, tp, load):
    init_megatron(tp=tp)
    model = _built(tiny_model("llama", tie_word_embeddings=True), fill)
    optimizer = adamw(model.parameters())
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    if load:
        with torch.no_grad():
            for tensor in [
                *model.parameters(),
                *(one for state in optimizer.state.values() for one in state.values()),
            ]:
                tensor.zero_()
    weights, moments = megasched.get_state_dict(model, optimizer)
    if load:
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
        megasched.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    else:
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    optimizer.step()
    return megasched.full_state_dict(model), sorted(weights), sorted(moments)


@pytest.mark.parametrize(("first", "then"), [((wrap, 2), (None, 1)), ((None, 1), (wrap, 2))])
def test_a_run_goes_on_with_and_without_a_replacement(ranks, tmp_path, first, then):
    folder = str(tmp_path / "saved")
    wanted, *names = ranks.run(first[1], _checkpoint, folder, first[0] or len, first[1], False)[0]
    found, *same = ranks.run(then[1], _checkpoint, folder, then[0] or len, then[1], True)[0]
    assert same == names
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def _source(kind, folder):
    whole = megasched.build_definition(tiny_config("llama"))
    return RandomInit(whole, torch.initial_seed()) if kind == "random" else HFFolder(folder, whole)


def _filled_late(fill, how, folder):
    """Whether a model that is filled after the build is one that was filled before."""
    init_megatron(tp=2)
    torch.manual_seed(5)
    before = megasched.materialize(megasched.build_definition(tiny_config("llama")), _source(how, folder))
    sch, late = megasched.create_schedule(before, name="auto"), megasched.build_definition(tiny_config("llama"))
    fill(sch)
    wanted, late_sch = megasched.build(sch), megasched.create_schedule(late, name="auto")
    fill(late_sch)
    if how == "init_weights":
        megasched.build(late_sch, init_weights=late._init_weights)
    else:
        megasched.materialize(megasched.build(late_sch), _source(how, folder))
    trained = [(name, one.requires_grad) for name, one in wanted.named_parameters()]
    assert trained == [(name, one.requires_grad) for name, one in late.named_parameters()]
    return [n for n, one in wanted.named_parameters() if not torch.equal(one, late.get_parameter(n))]


@pytest.mark.parametrize("fill", [wrap, adapt])
@pytest.mark.parametrize("how", ["random", "folder"])
def test_a_deferred_model_is_filled_by_the_definitions_names(ranks, tmp_path, fill, how):
    folder = str(tmp_path / "whole")
    tiny_model("llama").save_pretrained(folder)
    assert ranks.run(2, _filled_late, fill, how, folder) == [[], []]


def _initialised(fill):
    init_megatron(tp=2)
    torch.manual_seed(5)
    late = megasched.build_definition(tiny_config("llama"))
    sch = megasched.create_schedule(late, name="auto")
    fill(sch)
    megasched.build(sch, init_weights=late._init_weights)
    return [name for name, one in late.named_parameters() if one.is_meta], megasched.full_state_dict(late)


def test_a_deferred_model_is_initialised_alike(ranks):
    (none, plain), (still, wrapped), (meta, adapted) = (
        ranks.run(2, _initialised, fill)[0] for fill in (len, wrap, adapt)
    )
    assert none == still == meta == []
    assert plain.keys() == wrapped.keys()
    for found in (wrapped, adapted):
        assert all(torch.equal(found[name], tensor) for name, tensor in plain.items())


def _incomplete(module):
    """Leaves the head out, which is the last."""
    if not (isinstance(module, nn.Linear) and module.out_features == VOCABULARY):
        torch.nn.init.ones_(next(module.parameters(recurse=False), torch.empty(1)))


@pytest.mark.parametrize(
    ("factory", "weights", "initialise", "error", "what"),
    [
        (
            Norm,
            {"gain": lambda old: old["weight"] + 1},
            None,
            CheckpointError,
            "has made model.norm.gain of weights",
        ),
        (Norm, {"gain": "weight"}, _incomplete, ConfigError, "lm_head.weight: init_weights leaves it"),
    ],
)
def test_a_start_that_fails_leaves_the_model_as_it_was(factory, weights, initialise, error, what):
    late = megasched.build_definition(tiny_config("llama"))
    modules, sch = dict(late.named_modules()), megasched.create_schedule(late)
    sch["model.norm"].replace(factory, weights=weights)
    with pytest.raises(error, match=what):
        megasched.build(sch, init_weights=initialise or late._init_weights)
    assert dict(late.named_modules()) == modules
    assert not sch.built


def test_a_source_that_fails_half_way_leaves_the_model_as_it_was():
    late, whole = (megasched.build_definition(tiny_config("llama")) for _ in range(2))
    with pytest.raises(ConfigError, match="leaves it uninitialised"):
        megasched.materialize(late, RandomInit(whole, 1, _incomplete))
    assert all(parameter.is_meta for parameter in late.parameters())
