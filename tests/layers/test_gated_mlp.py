"""The activation of gated MLPs on the joint output of gate and up: what is taken for one, and its numbers."""

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from megasched.layers.fused import gated_mlp
from megasched.layers.fused.activations import ACTIVATIONS
from megasched.layers.fused.gated_mlp import GatedActivation, GatedMlp, _backward, _forward, fuse_gates
from megasched.layers.fused_columns import ProductOutput, SharedProduct

GATE_UP = ("gate_proj", "up_proj")
SIZES = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}


class Product(SharedProduct):
    """A product of plain linears, the last one first, as in Megatron's buffers."""

    def __init__(self, members):
        super().__init__()
        self.members, self.done = tuple(members), 0

    def _product(self, x):
        self.done += 1
        order = self.members[::-1]
        return ProductOutput(
            torch.cat([member(x) for member in order], -1), order, [m.out_features for m in order]
        )


class Clamped(LlamaMLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=100.0) * self.up_proj(x))


class Dropped(LlamaMLP):
    def forward(self, x):
        return self.down_proj(F.dropout(self.act_fn(self.gate_proj(x)) * self.up_proj(x), 0.5, self.training))


class Swapped(LlamaMLP):
    def forward(self, x):
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


def _mlp(kind, model_type="llama", **changes):
    torch.manual_seed(0)
    mlp = kind(AutoConfig.for_model(model_type, **SIZES, **changes)).double()
    product = Product([mlp.gate_proj, mlp.up_proj])
    mlp.gate_proj.fused_columns = mlp.up_proj.fused_columns = product
    return mlp, product


def _fused(mlp):
    return fuse_gates(nn.ModuleDict({"mlp": mlp}), [tuple(f"mlp.{name}" for name in GATE_UP)], lambda path: True)


@pytest.mark.parametrize(
    ("kind", "model_type", "changes"),
    [
        (LlamaMLP, "llama", {}),
        (LlamaMLP, "llama", {"mlp_bias": True}),
        (LlamaMLP, "llama", {"hidden_act": "relu"}),
        (LlamaMLP, "llama", {"hidden_act": "gelu"}),
        (GemmaMLP, "gemma", {}),  # tanh, by a module of transformers'
        (Qwen2MLP, "qwen2", {"hidden_act": "gelu_new"}),  # tanh, in eight operations
    ],
)
def test_a_gated_mlp_computes_the_same_from_the_product_output(kind, model_type, changes):
    mlp, product = _mlp(kind, model_type, **changes)
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    sources = [x, *mlp.parameters()]
    wanted = mlp(x)
    expected = torch.autograd.grad(wanted.square().sum(), sources)
    assert _fused(mlp) == {"mlp"}
    found = mlp(x)
    assert product.done == 1
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for one, other in zip(torch.autograd.grad(found.square().sum(), sources), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", [Clamped, Dropped])
def test_other_formulas_are_told_from_it(kind):
    mlp, _ = _mlp(kind)
    assert gated_mlp._gated_mlp(mlp, GATE_UP) is None


@pytest.mark.parametrize(("kind", "changes"), [(Swapped, {}), (LlamaMLP, {"hidden_act": "quick_gelu"})])
def test_code_of_others_stays_and_what_no_kernel_computes(kind, changes):
    """Code of others may leave behind what its output doesn't show."""
    mlp, product = _mlp(kind, **changes)
    assert _fused(mlp) == set()
    mlp(torch.randn(2, 5, 8, dtype=torch.float64))
    assert product.done == 0


class Scaled(nn.Module):
    """An activation that goes by a buffer."""

    def __init__(self, scale):
        super().__init__()
        self.register_buffer("scale", scale)

    def forward(self, x):
        return self.scale * F.silu(x)


class ScaledMLP(LlamaMLP):
    """Goes by a buffer of its own."""

    def forward(self, x):
        return self.down_proj(self.scale * self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("own", [True, False])
def test_each_of_those_that_go_by_buffers_is_tried(monkeypatch, own):
    """Other instances of the class have other values in them."""
    monkeypatch.setattr(ScaledMLP.forward, "__module__", LlamaMLP.__module__)
    taken = []
    for scale in torch.tensor([1.0, 2.0], dtype=torch.float64):
        mlp, _ = _mlp(ScaledMLP if own else LlamaMLP)
        mlp.config = None  # so that nothing else tells them apart
        if own:
            mlp.register_buffer("scale", scale)
        else:
            mlp.act_fn = Scaled(scale)
        taken.append(_fused(mlp))
    assert taken == [{"mlp"}, set()]


@pytest.mark.parametrize("hooked", ["gate_proj", "up_proj", "act_fn"])
def test_a_hook_on_what_is_passed_by_is_called(hooked):
    mlp, product = _mlp(LlamaMLP)
    _fused(mlp)
    calls = []
    mlp.get_submodule(hooked).register_forward_hook(lambda *call: calls.append(call))
    mlp(torch.randn(2, 5, 8, dtype=torch.float64))
    assert (len(calls), product.done) == (1, 0)


def test_a_wrapper_on_what_is_passed_by_is_called():
    mlp, product = _mlp(LlamaMLP)
    _fused(mlp)
    forward, calls = mlp.up_proj.forward, []
    mlp.up_proj.forward = lambda x: calls.append(x) or forward(x)
    mlp(torch.randn(2, 5, 8, dtype=torch.float64))
    assert (len(calls), product.done) == (1, 0)


@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gradient_is_autograds(activation, gate_first):
    torch.manual_seed(0)
    joint = torch.randn(3, 4, 10, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: GatedActivation.apply(x, activation, gate_first), joint)
    first, second = joint.chunk(2, dim=-1)
    gate, up = (first, second) if gate_first else (second, first)
    wanted = ACTIVATIONS[activation].forward(gate) * up
    found = GatedActivation.apply(joint, activation, gate_first)
    assert torch.equal(found, wanted)
    gradient = torch.randn_like(found)
    (one,), (other,) = (torch.autograd.grad(output, joint, gradient) for output in (found, wanted))
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_the_product_output_alone_is_kept():
    joint = torch.randn(3, 4, 10, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        GatedActivation.apply(joint, "silu", True)
    assert [each.data_ptr() for each in kept] == [joint.data_ptr()]


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_compiled_kernels_compute_the_same(activation, monkeypatch):
    """Inductor's code for a CPU is made from what its code for a GPU is made from."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    torch.manual_seed(0)
    joint, gradient = torch.randn(3, 64, 32), torch.randn(3, 64, 16)
    with torch._dynamo.config.patch(disable=False):
        forward = torch.compile(_forward)(joint, activation, False)
        backward = torch.compile(_backward)(gradient, joint, activation, False)
    torch.testing.assert_close(forward, _forward(joint, activation, False), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(backward, _backward(gradient, joint, activation, False), rtol=1e-5, atol=1e-6)


def test_children_are_named_by_what_they_do():
    """Whichever of the two columns is activated is the gate."""
    mlp, _ = _mlp(Swapped)
    assert gated_mlp._gated_mlp(mlp, GATE_UP) == GatedMlp("up_proj", "gate_proj", "down_proj", "silu")
