"""Masks that say what causality says: which are known to, and that attention goes without them."""

import pytest
import torch
from transformers.masking_utils import (
    causal_mask_function,
    eager_mask,
    sliding_window_causal_mask_function,
)

from megasched.definition.mask_interface import is_causal, of_queries, packed_masks
from megasched.layers import attention
from tests.lowering.models import tiny_model

SIZES = {"batch_size": 2, "q_length": 6, "kv_length": 6, "device": "cpu", "dtype": torch.float32}


def _made(function=causal_mask_function, **options):
    return of_queries(eager_mask)(mask_function=function, **{**SIZES, **options})


def test_a_mask_of_causality_alone_is_known():
    assert is_causal(_made())
    assert is_causal(_made().detach())  # as it is kept for recomputation


@pytest.mark.parametrize(
    "options",
    [
        {"function": sliding_window_causal_mask_function(3)},
        {"attention_mask": torch.ones(2, 6).bool()},
        {"q_offset": 2, "kv_length": 8},
    ],
)
def test_any_other_is_not(options):
    assert not is_causal(_made(**options))


def test_nor_is_one_of_packed_sequences():
    with packed_masks(torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)):
        assert not is_causal(_made())


def test_nor_is_one_that_was_written_to_or_a_part_of_one():
    mask = _made()
    assert not is_causal(mask[..., :4])
    mask[..., 0] = 0
    assert not is_causal(mask)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_attention_of_eager_classes_goes_without_it(family, monkeypatch):
    """They would be spelled out in [s, s] tensors for a mask that a kernel does not need."""
    seen = []
    resolve = attention.resolve

    def noted(module, settings, call, bounds):
        resolved = resolve(module, settings, call, bounds)
        seen.append((call.sliding_window is None, call.mask is None, resolved.mask is None, resolved.causal))
        return resolved

    monkeypatch.setattr(attention, "resolve", noted)
    model = tiny_model(family).eval()
    ids = torch.arange(3, 19)[None]
    before = model(ids, use_cache=False).logits
    restore = attention.enable(model)
    seen.clear()
    after = model(ids, use_cache=False).logits
    restore()
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    assert set(seen) == {(True, False, True, True), (False, False, False, False)}
