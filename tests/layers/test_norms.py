"""RMS norms by torch's kernel: which modules are taken for one, and what they give."""

import pytest
import torch
from torch import nn

from megasched.layers.fused import norms
from megasched.layers.fused.norms import fuse_norms
from tests.lowering.models import tiny_model


class Norm(nn.Module):
    """An RMS norm with one thing about it changed."""

    def __init__(self, kind="plain", size=8, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.variance_epsilon = eps
        self.kind = kind
        if kind == "biased":
            self.bias = nn.Parameter(torch.zeros(size))
        if kind == "raises":
            self.register_parameter("bias", None)
        if kind == "two epsilons":
            self.eps = 0.1
        self.factor = 1.0
        if kind == "counts":
            self.calls = 0
        if kind == "appends":
            self.seen = []

    def forward(self, x):
        gain = 1 + self.weight if self.kind == "one more" else self.weight
        if self.kind == "centred":
            x = x - x.mean(-1, keepdim=True)
        if self.kind == "raises":
            x = x.view(len(x), 3, -1, 2)
        mean = x.float().square().mean(-1, keepdim=True)
        eps = 0.0 if self.kind == "no epsilon" else self.variance_epsilon
        scale = torch.rsqrt(mean + eps) if self.kind != "outside" else 1 / (mean.sqrt() + eps)
        normed = gain * (x.float() * scale).to(x.dtype) * self.factor
        if self.kind == "of rows and tokens" and x.dim() == 3:
            normed = torch.cat([1.5 * normed[:, :1], normed[:, 1:]], dim=1)
        if self.kind == "of many tokens" and x.dim() == 3 and x.shape[1] > 40:
            normed = 1.5 * normed
        if self.kind == "keeps":
            self.last = mean.mean()
        if self.kind == "counts":
            self.calls += 1
        if self.kind == "appends":
            self.seen.append(mean.mean())
        if self.kind == "of heads" and x.dim() == 4:
            normed = 1.5 * normed
        if self.kind == "of rows":
            normed = normed - 0.1 * normed.mean(0, keepdim=True)
        return normed.clamp(max=20.0) if self.kind == "clamped" else normed


def is_fused(model, path=""):
    return "forward" in vars(model.get_submodule(path))


@pytest.mark.parametrize(
    ("kind", "fused"),
    [
        ("plain", True),
        ("one more", False),  # Gemma's
        ("centred", False),
        ("no epsilon", False),
        ("outside", False),
        ("biased", False),
        ("two epsilons", False),
        ("raises", False),
        ("clamped", False),
        ("of rows and tokens", False),
        ("of many tokens", False),
        ("of heads", False),
        ("of rows", False),
        ("keeps", False),
        ("counts", False),
        ("appends", False),
    ],
)
def test_only_what_computes_an_rms_norm_is_one(kind, fused):
    model = nn.Sequential(Norm(kind))
    fuse_norms(model, lambda path: True)
    assert is_fused(model, "0") == fused


def test_a_zero_centred_norm_that_is_not_of_transformers_stays_with_transformer_engine_too():
    """Code of others may leave behind what no output shows."""
    model = nn.Sequential(Norm("one more"))
    fuse_norms(model, lambda path: True, te=True)
    assert not is_fused(model, "0")


def test_each_instance_is_tried_with_what_it_was_given():
    """Scaling by depth (arXiv 2502.05795) is 1 in the first layer."""
    model = nn.Sequential(Norm(), Norm(), Norm())
    model[1].factor = 2**-0.5
    fuse_norms(model, lambda path: True)
    assert [is_fused(model, str(n)) for n in range(3)] == [True, False, True]


def test_a_class_whose_forward_was_replaced_is_tried_again(monkeypatch):
    """Packages of kernels do so to classes of transformers."""
    before, after = nn.Sequential(Norm()), nn.Sequential(Norm())
    fuse_norms(before, lambda path: True)
    monkeypatch.setattr(Norm, "forward", lambda self, x: 2 * x * self.weight)
    fuse_norms(after, lambda path: True)
    assert [is_fused(before, "0"), is_fused(after, "0")] == [True, False]


def test_values_and_gradients_are_the_modules_own():
    model, same = nn.Sequential(Norm()), nn.Sequential(Norm())
    same.load_state_dict(model.state_dict())
    fuse_norms(model, lambda path: True)
    x = torch.randn(2, 3, 8, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    weights = torch.linspace(0.5, 1.5, 48).view(2, 3, 8)
    for one, given in ((model, x), (same, y)):
        (one(given) * weights).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model[0].weight.grad, same[0].weight.grad, rtol=1e-5, atol=1e-6)


def test_the_trial_runs_no_hooks_and_changes_nothing():
    model = nn.Sequential(Norm())
    weight, calls = model[0].weight, []
    model[0].register_forward_hook(lambda *call: calls.append(call))
    fuse_norms(model, lambda path: True)
    assert is_fused(model, "0")
    assert not calls
    assert model[0].weight is weight


def test_it_is_called_as_its_own_forward_can_be_and_reads_its_own_epsilon():
    model, same = nn.Sequential(Norm()), nn.Sequential(Norm())
    same.load_state_dict(model.state_dict())
    fuse_norms(model, lambda path: True)
    x = torch.randn(2, 8)
    torch.testing.assert_close(model[0](x=x), same[0](x=x))
    model[0].variance_epsilon = same[0].variance_epsilon = 2.0
    torch.testing.assert_close(model[0](x), same[0](x))


def test_another_dtype_than_the_weights_goes_the_definitions_way():
    model = nn.Sequential(Norm())
    fuse_norms(model, lambda path: True)
    assert model(torch.ones(1, 8, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize(
    ("family", "count"), [("llama", 5), ("qwen3", 9), ("phi3", 5), ("gemma2", 9), ("gpt2", 0), ("opt", 0)]
)
def test_norms_of_the_families(family, count):
    """Two layers: two norms each (four with those of q and k, or after attention and MLP), and the last one."""
    model = tiny_model(family)
    fuse_norms(model, lambda path: True)
    assert sum("forward" in vars(module) for module in model.modules()) == count


def test_weights_on_meta_do_not_matter_and_places_are_chosen():
    with torch.device("meta"):
        model = nn.Sequential(Norm(), Norm())
    fuse_norms(model, lambda path: path == "1")
    assert (is_fused(model, "0"), is_fused(model, "1")) == (False, True)


def test_other_norms_of_transformers_are_compiled_as_they_are(monkeypatch):
    """Gemma's adds 1 to its weight, in float32."""
    calls = []

    def one_kernel(function):
        def counted(module, x):
            calls.append(type(module).__name__)
            return function(module, x)

        return counted

    monkeypatch.setattr(norms, "one_kernel", one_kernel)
    model = tiny_model("gemma2")
    ids = torch.arange(8)[None]
    before = model(ids).logits
    fuse_norms(model, lambda path: True)
    assert torch.equal(model(ids).logits, before)
    assert calls == ["Gemma2RMSNorm"] * (4 * model.config.num_hidden_layers + 1)
