"""Transformer Engine's attention is called with what it needs; a stand-in with its signature computes in torch.

It shows the mapping (heads, groups, layout, window, scale), not TE's kernels: those need a GPU.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from megasched.lowering import attention, attention_te
from megasched.lowering.attention import AttentionSettings, attention_forward


class StandIn:
    """``transformer_engine.pytorch.DotProductAttention`` as its documentation has it, for qkv_format bshd."""

    def __init__(self, **options):
        self.options = options
        assert options["qkv_format"] == "bshd"

    def __call__(self, query, key, value):
        left, right = self.options["window_size"]
        length = query.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool)
        if self.options["attn_mask_type"] == "causal":
            mask = mask.tril(right)
        if left >= 0:
            mask &= ~torch.ones_like(mask).tril(-left - 1)
        assert query.shape[2] * self.options["tp_size"] == self.options["num_attention_heads"]
        assert key.shape[2] * self.options["tp_size"] == self.options["num_gqa_groups"]
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        output = F.scaled_dot_product_attention(q, k, v, mask, scale=self.options["softmax_scale"])
        return output.transpose(1, 2).flatten(2)


@pytest.fixture
def te(monkeypatch):
    made = []

    class Recorded(StandIn):
        def __init__(self, **options):
            super().__init__(**options)
            made.append(options)

    monkeypatch.setattr(attention_te, "te_attention", lambda: Recorded)
    return made


def attend(core, **options):
    module = nn.Module()
    module.is_causal = True
    module.megasched_attention = AttentionSettings(4, False, core)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 7, 8, generator=generator)
    key, value = (torch.randn(2, 2, 7, 8, generator=generator) for _ in range(2))
    return attention_forward(module, query, key, value, options.pop("mask", None), **options)[0]


def window_mask(window):
    ones = torch.ones(7, 7, dtype=torch.bool)
    return (ones.tril() & ~ones.tril(-window)).expand(2, 1, 7, 7)


@pytest.mark.parametrize("scaling", [None, 0.3])
def test_causal_attention_with_grouped_heads(te, scaling):
    torch.testing.assert_close(
        attend(attention_te.TeCore(1, None), scaling=scaling), attend(None, scaling=scaling)
    )
    assert len(te) == 1


def test_a_sliding_window_is_tes_own_and_its_mask_is_not_needed(te):
    options = {"mask": window_mask(3), "sliding_window": 3}
    torch.testing.assert_close(attend(attention_te.TeCore(1, None), **options), attend(None, **options))
    assert te[0]["window_size"] == (2, 0)


def test_a_window_longer_than_the_sequence_is_none(te):
    torch.testing.assert_close(attend(attention_te.TeCore(1, None), sliding_window=50), attend(None))
    assert te[0]["window_size"] == (-1, 0)


def test_what_te_has_not_stays_with_torch(te):
    for options in ({"softcap": 2.0}, {"mask": window_mask(2)}):
        torch.testing.assert_close(attend(attention_te.TeCore(1, None), **options), attend(None, **options))
    assert te == []


def test_one_module_is_made_for_each_form_of_call(te):
    core = attention_te.TeCore(2, "group")
    for _ in range(3):
        attend(core)
    attend(core, sliding_window=3)
    assert [(options["window_size"], options["num_attention_heads"]) for options in te] == [
        ((-1, 0), 8),
        ((2, 0), 8),
    ]
    assert {options["tp_group"] for options in te} == {"group"}


def test_why_a_call_stays_with_torch_is_in_the_debug_log_once(te, caplog):
    module = nn.Module()
    module.megasched_attention = AttentionSettings(4, False, attention_te.TeCore(1, None))
    tensors = [torch.randn(2, heads, 7, 8) for heads in (4, 2, 2)]
    with caplog.at_level(logging.DEBUG, logger="megasched"):
        for _ in range(2):
            attention_forward(module, *tensors, window_mask(2))
    assert [record.getMessage() for record in caplog.records] == [
        "attention stays with torch, not Transformer Engine: a mask that is neither causal nor a sliding window"
    ]


@pytest.mark.parametrize("sharded", [True, False])
def test_dropout_differs_between_ranks_where_heads_are_cut_and_only_there(te, monkeypatch, sharded):
    """TE is given no tracker of random states: it would fork twice under SP, and where heads are whole."""
    forks = []

    @contextmanager
    def fork():
        forks.append(True)
        yield

    monkeypatch.setattr(attention, "fork_rng", fork)
    module = nn.Module()
    module.megasched_attention = AttentionSettings(4, sharded, attention_te.TeCore(1, None))
    attention_forward(module, *[torch.randn(2, heads, 7, 8) for heads in (4, 2, 2)], None, dropout=0.1)
    assert len(forks) == int(sharded)
    assert (te[0]["attention_dropout"], "get_rng_state_tracker" in te[0]) == (0.1, False)
