"""Every family, block by block: the traced model computes what the definition does, values and gradients."""

import copy

import pytest
import torch

import megasched
from tests import tiny
from tests.graph.running import graphs_run
from tests.lowering.models import randomize, tiny_model, token_ids

# family -> layer, attention, MLP or MoE block, norm; below the model
BLOCKS = {
    "llama": ("model.layers.0", "self_attn", "mlp", "input_layernorm"),
    "qwen3": ("model.layers.0", "self_attn", "mlp", "input_layernorm"),
    "gemma2": ("model.layers.0", "self_attn", "mlp", "input_layernorm"),
    "phi3": ("model.layers.0", "self_attn", "mlp", "input_layernorm"),
    "gpt2": ("transformer.h.0", "attn", "mlp", "ln_1"),
    "opt": ("model.decoder.layers.0", "self_attn", "activation_fn", "self_attn_layer_norm"),
    "gpt_neox": ("gpt_neox.layers.0", "attention", "mlp", "input_layernorm"),
    "bert": ("bert.encoder.layer.0", "attention", "intermediate", "output.LayerNorm"),
    "mixtral": ("model.layers.0", "self_attn", "mlp", "input_layernorm"),
}
SIZES = {**tiny._SMALL, "num_hidden_layers": 2}


def model_of(family):
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, BertConfig, MixtralConfig

    if family == "bert":
        config = BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        return randomize(AutoModelForMaskedLM.from_config(config, dtype=torch.float32)).train()
    if family == "mixtral":
        config = MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
        return randomize(AutoModelForCausalLM.from_config(config, dtype=torch.float32)).train()
    return tiny_model(family)


def run(model, batches):
    """Losses, and gradients added up over the batches."""
    more = {} if "Bert" in type(model).__name__ else {"use_cache": False}
    losses = [model(input_ids=ids, labels=ids, **more).loss for ids in batches]
    torch.stack(losses).sum().backward()
    return torch.stack(losses).detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", sorted(BLOCKS))
def test_traced_blocks_compute_what_the_definition_does(family):
    # Two batches of one form: what the first was routed, masked or rounded to must not stay in the graph.
    model, batches = model_of(family), (token_ids(), token_ids().flip(0, 1) % 90 + 4)
    want, gradients = run(copy.deepcopy(model), batches)
    layer, *blocks = BLOCKS[family]
    for block in ["", *blocks]:
        path = f"{layer}.{block}" if block else layer
        each = copy.deepcopy(model)
        names, keys = [n for n, _ in each.named_modules()], list(each.state_dict())
        sch = megasched.create_schedule(each)
        sch.level("leaf")  # what is fused, in layers that are not traced, rounds in another way
        sch[path].trace()
        megasched.build(sch)
        with graphs_run() as ran:
            losses, found = run(each, batches)
        assert len(ran) == 2, path
        assert ran[0] is ran[1], path
        assert torch.equal(losses, want), path
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert (gradient is None) == (found[name] is None), (path, name)
            assert gradient is None or torch.equal(found[name], gradient), (path, name)
        assert [n for n, _ in each.named_modules()] == names
        assert list(each.state_dict()) == keys
