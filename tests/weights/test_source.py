import pytest
import torch

from megasched.definition.build import build_definition
from megasched.errors import CheckpointError
from megasched.weights.hf.folder import HFFolder
from megasched.weights.random_init import RandomInit
from megasched.weights.source import canonical_names, compare_names, materialize


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(2, 3, bias=False)
        self.body = torch.nn.Linear(2, 2)
        self.embed = torch.nn.Embedding(3, 2)
        self.embed.weight = self.head.weight


def test_a_tie_goes_by_its_first_name():
    assert canonical_names(Tied()) == {
        "head.weight": "head.weight",
        "body.weight": "body.weight",
        "body.bias": "body.bias",
        "embed.weight": "head.weight",
    }


def test_canonical_names_are_those_of_named_parameters(definition):
    names = list(dict.fromkeys(canonical_names(definition).values()))
    assert names == [name for name, _ in definition.named_parameters()]


def test_compare_names_lists_both_sides_in_one_message():
    with pytest.raises(CheckpointError) as caught:
        compare_names("the weights in /models/x", {"b", "a"}, ["z"])
    text = str(caught.value)
    assert text.startswith("the weights in /models/x do not fit")
    assert "missing (2):\n    a\n    b\n" in text
    assert "unexpected (1):\n    z\n" in text


def test_compare_names_is_silent_when_all_fit():
    compare_names("anything", set(), [])


def test_from_a_folder_computes_what_the_saved_model_does(config, definition, trained, tmp_path):
    model = trained(config)
    model.save_pretrained(tmp_path)
    assert materialize(definition, HFFolder(tmp_path, definition)) is definition
    ids = torch.arange(4, 20).reshape(2, 8)
    with torch.no_grad():
        got, want = definition.eval()(ids).logits, model.eval()(ids, use_cache=False).logits
    assert torch.equal(got, want)


def test_from_random_init_of_the_same_definition(definition):
    source = RandomInit(definition, 3)
    materialize(definition, source)
    assert not any(param.is_meta for param in definition.parameters())
    assert not any(hasattr(param, "_is_hf_initialized") for param in definition.parameters())
    ids = torch.arange(4, 20).reshape(2, 8)
    assert definition(ids).logits.isfinite().all()


def test_ties_requires_grad_attributes_and_dtype(tiny):
    definition = build_definition(tiny("qwen2"))
    definition.model.norm.weight.requires_grad_(False)
    definition.model.norm.weight.mark = "kept"
    frequencies = definition.model.rotary_emb.inv_freq.clone()
    materialize(definition, RandomInit(definition, 3), torch.bfloat16)
    assert definition.lm_head.weight is definition.model.embed_tokens.weight
    assert definition.model.norm.weight.requires_grad is False
    assert definition.model.norm.weight.mark == "kept"
    assert {param.dtype for param in definition.parameters()} == {torch.bfloat16}
    assert torch.equal(definition.model.rotary_emb.inv_freq, frequencies)


def test_a_source_that_does_not_fit_is_refused_before_anything_is_filled(tiny):
    source = RandomInit(build_definition(tiny("llama", num_hidden_layers=1)), 3)
    definition = build_definition(tiny("llama"))
    with pytest.raises(CheckpointError, match=r"missing \(9\)"):
        materialize(definition, source)
    assert all(param.is_meta for param in definition.parameters())
