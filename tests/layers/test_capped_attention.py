"""FlexAttention with capped logits against the same spelled out; on a CPU, as torch interprets it."""

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from megasched.layers.attention import AttentionSettings, attention_forward
from megasched.layers.fused import capped_attention
from megasched.layers.torch_attention import plain_attention

LENGTH, HEADS, WIDTH = 20, 4, 16


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Takes the CPU for a GPU that compiles, and has torch interpret FlexAttention, gradients too."""
    monkeypatch.setattr(capped_attention, "compiles", lambda device: True)
    monkeypatch.setattr(capped_attention, "_compiled", lambda function: function)
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    capped_attention._mask.cache_clear()
    yield
    capped_attention._mask.cache_clear()


def _tensors(groups, value_width=WIDTH):
    generator = torch.Generator().manual_seed(0)
    sizes = ((HEADS, WIDTH), (groups, WIDTH), (groups, value_width))
    return [
        torch.randn(2, heads, LENGTH, width, generator=generator, requires_grad=True) for heads, width in sizes
    ]


def _window_mask(window):
    ones = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    return (ones.tril() & ~ones.tril(-window))[None, None]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("window", [None, 3, LENGTH])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_values_and_gradients(groups, window, scaling, monkeypatch):
    """As an attention calls it: with the mask that HF makes of a window, which here is not looked at."""
    monkeypatch.setattr("megasched.layers.attention.plain_attention", None)
    module = torch.nn.Module()
    module.is_causal, module.megasched_attention = True, AttentionSettings(None, sharded=False)
    tensors = _tensors(groups)
    mask = None if window is None else _window_mask(window)
    options = {"softcap": 2.0, "scaling": scaling, "sliding_window": window}
    found = attention_forward(module, *tensors, mask, **options)[0].transpose(1, 2)
    causal = _window_mask(LENGTH if window is None else window)
    expected = plain_attention(*tensors, causal, False, 0.0, scaling, softcap=2.0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    weights = torch.linspace(-1, 1, found.numel()).view(found.shape)
    ours, theirs = (torch.autograd.grad((made * weights).sum(), tensors) for made in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_it_takes_what_its_kernels_take(monkeypatch):
    query, key, value = _tensors(HEADS)
    assert capped_attention.takes(query, key, value)
    assert not capped_attention.takes(*(each.double() for each in (query, key, value)))
    assert not capped_attention.takes(query, key, value[..., :8])
    assert not capped_attention.takes(query[:, :, :10], key, value)  # a context parallel rank's queries
    monkeypatch.setattr(capped_attention, "compiles", lambda device: False)
    assert not capped_attention.takes(query, key, value)


@pytest.mark.parametrize(
    "others",
    [{"dropout": 0.1}, {"s_aux": torch.zeros(HEADS)}, {"is_causal": False}, {"attention_mask": _window_mask(3)}],
)
def test_what_it_does_not_know_is_spelled_out(others, monkeypatch):
    """A mask that no window explains, among others."""
    monkeypatch.setattr(capped_attention, "capped_attention", None)
    module = torch.nn.Module()
    module.is_causal = True
    given = {"attention_mask": None, **others}
    assert attention_forward(module, *_tensors(HEADS), softcap=2.0, **given)[0].isfinite().all()
