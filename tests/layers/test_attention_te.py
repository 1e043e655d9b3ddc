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

from megasched.definition.sequence_split import Zigzag
from megasched.errors import MegaschedError
from megasched.language.tensor_types import ShardDim
from megasched.layers import attention
from megasched.layers.attention import AttentionSettings, attention_forward
from megasched.layers.packed import packed_mask
from megasched.layers.te import attention as attention_te


class StandIn:
    """``transformer_engine.pytorch.DotProductAttention`` as its documentation has it: bshd, and packed as thd."""

    def __init__(self, **options):
        self.options = options
        packed = options["qkv_format"] == "thd"
        assert packed or options["qkv_format"] == "bshd"
        assert packed == (options["attn_mask_type"] == "padding_causal")

    def __call__(self, query, key, value, cu_seqlens_q=None, cu_seqlens_kv=None, max_seqlen_q=0, max_seqlen_kv=0):
        if self.options["qkv_format"] == "bshd":
            return self._attend(query, key, value)
        assert cu_seqlens_q.dtype == torch.int32
        assert cu_seqlens_kv.equal(cu_seqlens_q)
        lengths = cu_seqlens_q.diff().tolist()
        assert max_seqlen_q == max_seqlen_kv == max(lengths)
        each = zip(*(tensor.split(lengths) for tensor in (query, key, value)), strict=True)
        return torch.cat([self._attend(*(one[None] for one in qkv))[0] for qkv in each])

    def _attend(self, query, key, value):
        assert query.dtype == key.dtype == value.dtype
        left, right = self.options["window_size"]
        length = query.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool)
        if self.options["attn_mask_type"] != "no_mask":
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
    value = value.to(options.pop("dtype", value.dtype))
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


def test_under_autocast_a_rotary_embedding_leaves_queries_and_keys_in_float32(te):
    """TE refuses several dtypes, where torch's attention has them cast."""
    with torch.autocast("cpu", torch.bfloat16):
        found = attend(attention_te.TeCore(1, None), dtype=torch.bfloat16)
        torch.testing.assert_close(found, attend(None, dtype=torch.bfloat16))
    assert found.dtype == torch.bfloat16
    assert len(te) == 1


def test_a_sliding_window_is_tes_own_and_its_mask_is_not_needed(te):
    options = {"mask": window_mask(3), "sliding_window": 3}
    torch.testing.assert_close(attend(attention_te.TeCore(1, None), **options), attend(None, **options))
    assert te[0]["window_size"] == (2, 0)


def test_a_window_as_long_as_the_sequence_is_none(te):
    """HF makes its mask, which says what causality says; Mistral at 4,096 tokens, say."""
    options = {"mask": window_mask(7), "sliding_window": 7}
    torch.testing.assert_close(attend(attention_te.TeCore(1, None), **options), attend(None, **options))
    assert te[0]["window_size"] == (-1, 0)


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


# ---- packed sequences -----------------------------------------------------------------------------

BOUNDS = torch.tensor([0, 3, 7, 13, 14], dtype=torch.int32)  # of two rows of seven


def attend_packed(core, mask, bounds=BOUNDS, **options):
    module = nn.Module()
    module.is_causal = True
    module.megasched_attention = AttentionSettings(4, False, core, packed=True)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, heads, 7, 8, generator=generator) for heads in (4, 2, 2)]
    given = {} if bounds is None else {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 6}
    return attention_forward(module, *tensors, mask, **given, **options)[0]


@pytest.mark.parametrize("window", [None, 3])
def test_packed_sequences_are_handed_over_by_their_bounds(te, window):
    mask, options = packed_mask(BOUNDS, 2, 7, window), {"sliding_window": window}
    core = attention_te.TeCore(1, None)
    torch.testing.assert_close(attend_packed(core, mask, **options), attend_packed(None, mask, **options))
    assert (te[0]["qkv_format"], te[0]["window_size"]) == ("thd", (-1, 0) if window is None else (2, 0))


def test_packed_sequences_whose_mask_says_more_or_that_te_has_not_stay_with_torch(te):
    """A window's mask divides sequences, too: without their bounds TE would see the window alone."""
    core, windowed = attention_te.TeCore(1, None), packed_mask(BOUNDS, 2, 7, 3)
    for mask, options in (
        (windowed, {"sliding_window": 3, "bounds": None}),
        (windowed, {}),
        (packed_mask(BOUNDS, 2, 7), {"softcap": 2.0}),
    ):
        torch.testing.assert_close(attend_packed(core, mask, **options), attend_packed(None, mask, **options))
    assert te == []


# ---- context parallelism --------------------------------------------------------------------------


class OneOfTwo:
    """Stands for ``ContextParallel`` on a rank of two, in one process: the whole of a tensor is known."""

    def __init__(self, rank, key, value):
        self.zigzag, self.key, self.value = Zigzag(2, rank), key, value

    def gather_together(self, key, value):
        return self.key, self.value


def context(kind):
    return attention_te.TeCpArgs("group", [3, 7], "stream", kind, 2)


def parts_of_attention(core, rank=1, dtype=torch.bfloat16, heads=4, **options):
    """One rank's part of what ``attend`` computes of all of a sequence of 8; and that."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, heads, 8, 8, generator=generator).to(dtype)
    key, value = (torch.randn(2, heads // 2, 8, 8, generator=generator).to(dtype) for _ in range(2))
    ranks = OneOfTwo(rank, key, value)
    own = [ranks.zigzag.local_sequence(t, ShardDim(2)) for t in (query, key, value)]
    mask = options.pop("mask", None)
    part = None if mask is None else ranks.zigzag.local_sequence(mask, ShardDim(2))
    found = []
    for tensors, allowed, settings in (
        (own, part, AttentionSettings(heads, False, core, ranks)),
        ((query, key, value), mask, AttentionSettings(heads, False)),
    ):
        module = nn.Module()
        module.is_causal = True
        module.megasched_attention = settings
        found.append(attention_forward(module, *tensors, allowed, **options)[0])
    return found[0], ranks.zigzag.local_sequence(found[1], ShardDim(1))


WINDOW = {"mask": torch.ones(8, 8, dtype=torch.bool).tril().triu(-2).expand(2, 1, 8, 8), "sliding_window": 3}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "options", [{}, WINDOW, {"softcap": 2.0}, {"s_aux": torch.linspace(-1, 1, 4)}, {"is_causal": False}]
)
def test_a_ranks_queries_meet_the_keys_of_all(rank, options):
    got, wanted = parts_of_attention(None, rank, torch.float32, **options)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(("kind", "options"), [("p2p", {}), ("a2a", WINDOW), ("all_gather", WINDOW)])
def test_transformer_engine_is_told_who_shares_a_sequence(te, kind, options):
    """It is handed this rank's keys and exchanges them itself."""
    parts_of_attention(attention_te.TeCore(1, None, context(kind)), **options)
    told = {name: te[0][name] for name in ("cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type")}
    assert told == {"cp_group": "group", "cp_global_ranks": [3, 7], "cp_stream": "stream", "cp_comm_type": kind}
    assert te[0]["window_size"] == ((2, 0) if options else (-1, 0))
    assert te[0]["attn_mask_type"] == "causal"


def test_without_context_parallelism_it_is_told_nothing_of_it(te):
    attend(attention_te.TeCore(1, None))
    assert not [name for name in te[0] if name.startswith("cp_")]


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        ("p2p", WINDOW, "a sliding window under --cp-comm-type p2p"),
        ("all_gather", {"s_aux": torch.linspace(-1, 1, 4)}, "sinks under --cp-comm-type all_gather"),
        ("p2p", {"dtype": torch.float32}, "context parallelism in 32 bits"),
        ("a2a", {"heads": 2}, "--cp-comm-type a2a with 2 and 1 heads on 2 ranks"),
    ],
)
def test_what_transformer_engine_has_not_under_context_parallelism_stays_with_torch(
    te, caplog, kind, options, why
):
    core = attention_te.TeCore(1, None, context(kind))
    with caplog.at_level(logging.DEBUG, logger="megasched"):
        got, wanted = parts_of_attention(core, **options)
    torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)
    assert te == []
    assert why in caplog.text


def test_a_mask_of_a_part_of_the_sequence_is_refused():
    module = nn.Module()
    tensors = [torch.zeros(1, 2, 4, 8) for _ in range(3)]
    whole = [torch.zeros(1, 2, 8, 8) for _ in range(2)]
    module.megasched_attention = AttentionSettings(2, False, None, OneOfTwo(0, *whole))
    with pytest.raises(MegaschedError, match="for 4 queries of this rank and 8 keys of all"):
        attention_forward(module, *tensors, torch.ones(1, 1, 4, 4, dtype=torch.bool))
