"""Patterns match every spelling of what they compute, and nothing that is nearly it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import megasched
from megasched.graph import patterns
from tests.graph.test_primitives import X, refusal, schedule

C = math.sqrt(2 / math.pi)


class Holder(nn.Module):
    """[2, 3, 8] and more tensors -> [2, 3, 8], by any function of them and of the module's parameters."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(8))
        self.gelu, self.tanh_gelu = nn.GELU(), nn.GELU(approximate="tanh")

    def forward(self, x, y):
        return self.function(self, x, y)


def found(function, pattern, **options):
    sch = megasched.create_schedule(nn.Sequential(Holder(function)))
    sch["0"].trace(inputs={"x": torch.empty(2, 3, 8), "y": torch.empty(2, 3, 8)})
    return sch["0"].find(pattern, missing_ok=True, **options)


def tanh_form(y):
    return 0.5 * y * (1 + torch.tanh(C * (y + 0.044715 * y**3)))


def turned(x, y, half):
    return x * y + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * y.sin()


MATCHES = {
    "functional": (lambda m, x, y: F.gelu(x + m.weight), patterns.bias_gelu, "bias_gelu:erf"),
    "module": (lambda m, x, y: m.gelu(m.weight + x), patterns.bias_gelu, "bias_gelu:erf"),
    "method": (lambda m, x, y: nn.functional.gelu(x.add(m.weight)), patterns.bias_gelu, "bias_gelu:erf"),
    "tanh module": (lambda m, x, y: m.tanh_gelu(x + m.weight), patterns.bias_gelu, "bias_gelu:tanh"),
    "tanh by hand": (lambda m, x, y: tanh_form(x + m.weight), patterns.bias_gelu, "bias_gelu:tanh"),
    "erf by hand": (
        lambda m, x, y: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
        patterns.gelu,
        "gelu:erf",
    ),
    "swiglu": (lambda m, x, y: F.silu(x) * y, patterns.swiglu, "swiglu"),
    "swiglu turned": (lambda m, x, y: y * nn.SiLU()(x), patterns.swiglu, "swiglu"),
    "swiglu by hand": (lambda m, x, y: x * torch.sigmoid(x) * y, patterns.swiglu, "swiglu"),
    "rms norm": (
        lambda m, x, y: m.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
        patterns.rms_norm,
        "rms_norm",
    ),
    "rms norm, torch's": (
        lambda m, x, y: F.rms_norm(x, (8,), m.weight, 1e-6),
        patterns.rms_norm,
        "rms_norm:fused",
    ),
    "layer norm": (
        lambda m, x, y: F.layer_norm(x, (8,), m.weight, m.weight, 1e-5),
        patterns.layer_norm,
        None,  # weight and bias are one here, which is another function
    ),
    "rotary": (
        lambda m, x, y: turned(x[:, None], y[:, None], 4),
        patterns.rotary,
        "rotary",
    ),
    "cross entropy": (
        lambda m, x, y: F.cross_entropy(x[:, 0], y[:, 0, 0].long()),
        patterns.softmax_cross_entropy,
        "softmax_cross_entropy",
    ),
    "cross entropy in two": (
        lambda m, x, y: F.nll_loss(torch.log_softmax(x[:, 0], -1), y[:, 0, 0].long()),
        patterns.softmax_cross_entropy,
        "softmax_cross_entropy",
    ),
    "dropout and add": (lambda m, x, y: y + F.dropout(x, 0.3), patterns.dropout_add, "dropout_add"),
}


@pytest.mark.parametrize("name", sorted(set(MATCHES) - {"layer norm"}))
def test_every_spelling_is_found(name):
    function, pattern, title = MATCHES[name]
    assert [part.pattern for part in found(function, pattern)] == [title]


NEAR_MISSES = {
    "another constant": (
        lambda m, x, y: 0.5 * x * (1 + torch.tanh(C * (x + 0.044 * x**3))),
        patterns.gelu,
    ),
    "another power": (lambda m, x, y: 0.5 * x * (1 + torch.tanh(C * (x + 0.044715 * x**2))), patterns.gelu),
    "another operand": (lambda m, x, y: y * 0.5 * (1 + torch.erf(x / math.sqrt(2))), patterns.gelu),
    "no bias": (lambda m, x, y: F.gelu(x * m.weight), patterns.bias_gelu),
    "gate by gelu": (lambda m, x, y: F.gelu(x) * y, patterns.swiglu),
    "gate needed again": (lambda m, x, y: F.silu(x) * y + F.silu(x).sum() * 0 + x, patterns.rotary),
    "mean over another axis": (
        lambda m, x, y: m.weight * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)),
        patterns.rms_norm,
    ),
    "halves the other way": (
        lambda m, x, y: (
            x[:, None] * y[:, None] + torch.cat((x[:, None, :, 4:], -x[:, None, :, :4]), dim=-1) * y[:, None].sin()
        ),
        patterns.rotary,
    ),
    "uneven halves": (
        lambda m, x, y: (
            x[:, None] * y[:, None] + torch.cat((-x[:, None, :, 5:], x[:, None, :, :5]), dim=-1) * y[:, None].sin()
        ),
        patterns.bias_gelu,
    ),
    "smoothed": (
        lambda m, x, y: F.cross_entropy(x[:, 0], y[:, 0, 0].long(), label_smoothing=0.1),
        patterns.softmax_cross_entropy,
    ),
    "no training": (lambda m, x, y: y + F.dropout(x, 0.3, training=False), patterns.dropout_add),
    "one tensor for weight and bias": (MATCHES["layer norm"][0], patterns.swiglu),
}


@pytest.mark.parametrize("name", sorted(NEAR_MISSES))
def test_what_is_nearly_it_is_not_found(name):
    assert found(*NEAR_MISSES[name]) == []


def test_a_value_needed_elsewhere_too_is_no_match():
    def twice(m, x, y):
        gate = F.silu(x)
        return gate * y + gate

    assert found(twice, patterns.swiglu) == []


@settings(max_examples=12)
@given(eps=st.floats(1e-8, 1e-2))
def test_the_number_that_a_pattern_leaves_open_is_told(eps):
    parts = found(lambda m, x, y: F.rms_norm(x, (8,), m.weight, eps), patterns.rms_norm)
    assert parts[0].scalars == {"eps": eps}
    assert parts[0].inputs == ("x", "weight")


def test_functions_modules_and_wildcards_are_patterns():
    def function(m, x, y):
        return torch.relu(m.gelu(x) * y)

    assert found(function, lambda a, b: torch.relu(a * b))[0].nodes == ("mul", "relu")
    assert found(function, nn.GELU())[0].nodes == ("gelu.gelu",)
    assert found(function, lambda a: torch.relu(patterns.anything(a, a))) == []
    part = found(function, lambda a, b: torch.relu(patterns.call("mul", patterns.call(".*gelu", a), b)))[0]
    assert part.nodes == ("gelu.gelu", "mul", "relu")
    assert part.inputs == ("x", "y")


def test_a_conversion_that_converts_nothing_hides_no_input():
    """In a trace, what reads ``x`` after ``x.to(float32)`` reads the conversion, where that does nothing."""

    def scaled_by_itself(m, x, y):
        wide = x.to(torch.float32)
        return x * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    assert [part.inputs for part in found(scaled_by_itself, patterns.rms_norm)] == [("x", "x")]


NO_PATTERNS = {
    "a constant": (lambda one: True, "does not return what one operation gives"),
    "its own argument": (lambda x: x, "does not return what one operation gives"),
    "a conversion of its argument": (lambda x: x.float(), "does not return what one operation gives"),
    "two results": (lambda x: (F.gelu(x), x + 1), "does not return what one operation gives"),
    "no tensor of it": (lambda x: x.shape[0], "does not return what one operation gives"),
    "what it is not given": (lambda x: x.operation, "can't be traced: AttributeError"),
    "a class": (nn.GELU, "the class GELU is neither a regular expression nor a pattern"),
    "a list": (["act.gelu"], "['act.gelu'] is neither a regular expression nor a pattern"),
}


@pytest.mark.parametrize("name", NO_PATTERNS)
def test_what_is_no_pattern_is_refused_where_it_is_asked_for(name):
    what, why = NO_PATTERNS[name]
    told = refusal(schedule()["0"].find, what, missing_ok=True)
    for said in (why, "module: 0\n    asked for at: ", "one parameter, called node"):
        assert said in told


def test_a_number_that_a_pattern_writes_is_no_size():
    class Caps(nn.Module):
        def forward(self, x):
            return (x * 24).clamp(max=50).reshape(-1, x.shape[-1]).sum(0) / x.shape[-1]

    sch = megasched.create_schedule(nn.Sequential(Caps()))
    sch["0"].trace(inputs={"x": X})
    find = sch["0"].find
    assert not find(lambda x: x.clamp(max=20), missing_ok=True)
    assert not find(lambda x: x * 12, missing_ok=True)
    assert find(lambda x: x.clamp(max=50))[0].nodes == ("clamp",)
    assert find(lambda x: (x * 24).clamp(max=50))[0].nodes == ("mul", "clamp")
    assert find(lambda x: x.reshape(-1, x.shape[-1]))  # a size of the example stands for any
    assert find(lambda x: x.sum(0) / x.shape[-1])


def test_a_weighed_sum_is_not_turned_round():
    class Weighs(nn.Module):
        def forward(self, x):
            return torch.add(x.relu(), x.sin(), alpha=2)

    sch = megasched.create_schedule(nn.Sequential(Weighs()))
    sch["0"].trace(inputs={"x": X})
    assert not sch["0"].find(lambda x, y: torch.add(x, y.relu(), alpha=2), missing_ok=True)
    assert sch["0"].find(lambda x, y: torch.add(x.relu(), y, alpha=2))
