"""Experts by fewer kernels: which are fused, that numbers stay, and what is kept for the backward."""

import importlib

import pytest
import torch

from megasched.layers.fused import experts, pairs
from tests.lowering.models import randomize, tiny_model
from tests.lowering.parity import distance

TOKENS, WIDTH, INNER, COUNT, CHOICES = 13, 16, 8, 4, 2
SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "moe_intermediate_size": INNER,
    "num_attention_heads": 2,
}
# model type, class of experts, fields of the config: a gate or none, weights transposed or not
FORMS = {
    "gate": ("mixtral", "MixtralExperts", {"num_local_experts": COUNT}),
    "no gate": ("nemotron_h", "NemotronHExperts", {"n_routed_experts": COUNT}),
    "transposed": ("aria_text", "AriaExperts", {"moe_num_experts": COUNT}),
}
KEPT = {
    "biases": ("gpt_oss", "GptOssExperts", {"num_local_experts": COUNT}),
    "a norm after them": (
        "muse_spark_text",
        "MuseSparkExperts",
        {"num_local_experts": COUNT, "moe_hidden_size": WIDTH},
    ),
}


def made(model_type, name, fields):
    """One module of experts, float32, in the grouped form."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type, **SIZES, **fields)
    config._experts_implementation = "grouped_mm"
    folder = model_type.removesuffix("_text")
    kind = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), name)
    return randomize(kind(config)).train()


def inputs(choices=CHOICES):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator)
    index = torch.rand(TOKENS, COUNT, generator=generator).argsort(-1)[:, :choices]
    return hidden.requires_grad_(), index, torch.rand(TOKENS, choices, generator=generator).requires_grad_()


def results(module, hidden, index, weights):
    """Output, and gradients of tokens, weights and parameters."""
    output = module(hidden, index, weights)
    scale = torch.linspace(-1, 1, output.numel()).view_as(output)
    return [output.detach(), *torch.autograd.grad((output * scale).sum(), [hidden, weights, *module.parameters()])]


@pytest.mark.parametrize("choices", [1, CHOICES, COUNT])
@pytest.mark.parametrize("form", FORMS)
def test_all_forms_compute_what_the_definition_does(form, choices):
    module = made(*FORMS[form])
    given = inputs(choices)
    module.config._experts_implementation = "eager"  # the definition's own code
    wanted = results(module, *given)
    module.config._experts_implementation = "grouped_mm"
    experts.fuse_experts(module, lambda path: True)
    assert "forward" in vars(module)
    got = results(module, *given)
    assert max(map(distance, got, wanted)) < 2e-6


def test_an_expert_without_tokens_gets_no_gradient():
    module = made(*FORMS["gate"])
    hidden, index, weights = inputs(choices=2)
    index = index.clamp(max=2)  # none for the last one
    experts.fuse_experts(module, lambda path: True)
    *_, first, last = results(module, hidden, index, weights)
    assert first[:3].abs().amax((1, 2)).min() > 0
    assert last[:3].abs().amax((1, 2)).min() > 0
    assert not first[3].any()
    assert not last[3].any()


def test_no_tensor_of_pairs_and_hidden_size_is_kept_but_the_first_inputs():
    """HF keeps what the last products make, too, for the gradient of the weights."""
    kept = {}
    for fused in (False, True):
        module = made(*FORMS["gate"])
        if fused:
            experts.fuse_experts(module, lambda path: True)
        shapes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, shapes=shapes: shapes.append(t.shape), lambda t: t
        ):
            module(*inputs())
        kept[fused] = shapes.count((TOKENS * CHOICES, WIDTH))
    assert kept == {False: 2, True: 1}


@pytest.mark.parametrize("form", KEPT)
def test_what_comes_after_the_last_products_stays_there(form):
    module = made(*KEPT[form])
    wanted = results(module, *inputs())
    experts.fuse_experts(module, lambda path: True)
    assert "forward" not in vars(module)
    assert "_apply_gate" in vars(module)
    assert max(map(distance, results(module, *inputs()), wanted)) == 0


def test_the_eager_form_stays():
    model = tiny_model("mixtral")
    model.set_experts_implementation("eager")
    experts.fuse_experts(model, lambda path: True)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(("power", "by_transformers"), [(2, True), (1, True), (1, False)])
def test_a_class_that_weighs_in_another_way_is_found_by_numbers_and_code_of_others_stays(power, by_transformers):
    """Code of others may leave behind what no number shows."""
    module = made(*FORMS["gate"])
    original = type(module).forward

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return original(self, hidden_states, top_k_index, top_k_weights.pow(power))

    forward.__module__ = original.__module__ if by_transformers else __name__
    module.__class__ = type("Other", (type(module),), {"forward": forward})
    experts.fuse_experts(module, lambda path: True)
    assert ("forward" in vars(module)) == (power == 1 and by_transformers)


@pytest.fixture
def calls(monkeypatch):
    """The functions that run by a kernel."""
    found = []

    def one_kernel(function):
        def counted(*args):
            found.append(function.__qualname__)
            return function(*args)

        return counted

    for module in (experts, pairs):
        monkeypatch.setattr(module, "one_kernel", one_kernel)
    return found


def test_gate_and_weights_are_one_kernel_and_sums_of_tokens_are_one(calls):
    module = made(*FORMS["gate"])
    experts.fuse_experts(module, lambda path: True)
    calls.clear()  # those of the trial
    results(module, *inputs())
    assert calls == [
        "_small_keys",
        "_weighted_gate",
        "_sum_rows",
        "_sum_rows",
    ]  # the last one is of the tokens' gradient


def test_a_gate_between_biases_is_one_kernel(calls):
    module = made(*KEPT["biases"])
    experts.fuse_experts(module, lambda path: True)
    module(*inputs())
    assert calls == ["GptOssExperts._apply_gate"]


def test_code_of_others_and_other_paths_stay():
    model = tiny_model("mixtral")
    kind = type(model.model.layers[0].mlp.experts)
    model.model.layers[0].mlp.experts.__class__ = type(
        "Own", (kind,), {"_apply_gate": lambda self, gate_up: gate_up}
    )
    experts.fuse_experts(model, lambda path: "layers.1" not in path)
    assert not any({"_apply_gate", "forward"} & set(vars(module)) for module in model.modules())


def test_a_method_of_an_instance_stays():
    model = tiny_model("mixtral")
    held = model.model.layers[0].mlp.experts
    own = held._apply_gate = lambda gate_up: gate_up.chunk(2, dim=-1)[0]
    experts.fuse_experts(model, lambda path: True)
    assert vars(held)["_apply_gate"] is own
    assert "forward" not in vars(held)


def test_experts_in_a_form_of_their_own_have_their_gate_compiled_alone():
    module = made(*FORMS["gate"])
    for name in ("is_transposed", "has_bias", "config"):  # what the decorator of transformers leaves
        delattr(module, name)
    experts.fuse_experts(module, lambda path: True)
    assert "forward" not in vars(module)
    assert "_apply_gate" in vars(module)
