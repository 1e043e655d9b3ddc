"""What experts put between their products, by one kernel: which methods are compiled, and that numbers stay."""

import pytest
import torch

from megasched.layers.fused import expert_gates
from tests.lowering.models import tiny_model


@pytest.fixture
def calls(monkeypatch):
    """The methods that run by a kernel."""
    found = []

    def one_kernel(function):
        def counted(module, gate_up):
            found.append(function.__qualname__)
            return function(module, gate_up)

        return counted

    monkeypatch.setattr(expert_gates, "one_kernel", one_kernel)
    return found


@pytest.mark.parametrize(
    ("family", "method"),
    [("mixtral", "_default_apply_gate"), ("gpt_oss", "GptOssExperts._apply_gate"), ("llama", None)],
)
def test_experts_of_transformers_call_it_and_numbers_stay(family, method, calls):
    model = tiny_model(family)
    if method is not None:
        model.set_experts_implementation("grouped_mm")
    ids = torch.arange(3, 11)[None]
    before = model(ids).logits
    expert_gates.fuse_expert_gates(model, lambda path: True)
    assert torch.equal(model(ids).logits, before)
    assert calls == ([] if method is None else [method] * model.config.num_hidden_layers)


def test_code_of_others_and_other_paths_stay(calls):
    model = tiny_model("mixtral")
    kind = type(model.model.layers[0].mlp.experts)
    model.model.layers[0].mlp.experts.__class__ = type(
        "Own", (kind,), {"_apply_gate": lambda self, gate_up: gate_up}
    )
    expert_gates.fuse_expert_gates(model, lambda path: "layers.1" not in path)
    assert not any("_apply_gate" in vars(module) for module in model.modules())


def test_a_method_of_an_instance_stays(calls):
    model = tiny_model("mixtral")
    experts = model.model.layers[0].mlp.experts
    own = experts._apply_gate = lambda gate_up: gate_up.chunk(2, dim=-1)[0]
    expert_gates.fuse_expert_gates(model, lambda path: True)
    assert vars(experts)["_apply_gate"] is own
