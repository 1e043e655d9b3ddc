"""The attention function against plain arithmetic: grouped heads, masks, windows, soft-caps, sinks, biases."""

import math

import pytest
import torch
from torch import nn

from megasched.analysis.trials.attention_switch import is_used
from megasched.errors import MegaschedError
from megasched.layers.attention import AttentionSettings, attention_forward
from tests.lowering.models import tiny_model

B, HEADS, S, D = 2, 4, 6, 8


class Module(nn.Module):
    is_causal = True


def tensors(groups, value_dim=D, keys=S):
    generator = torch.Generator().manual_seed(1)
    return tuple(
        torch.randn(B, heads, length, dim, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads, length, dim in ((HEADS, S, D), (groups, keys, D), (groups, keys, value_dim))
    )


def by_hand(q, k, v, allowed, scaling=None, softcap=None, bias=None, sinks=None):
    """One head and one query at a time."""
    out = torch.zeros(B, S, HEADS, v.shape[-1], dtype=q.dtype)
    for b in range(B):
        for head in range(HEADS):
            group = head * k.shape[1] // HEADS
            for i in range(S):
                logits = (k[b, group] @ q[b, head, i]) * (scaling or 1 / math.sqrt(D))
                if softcap is not None:
                    logits = softcap * torch.tanh(logits / softcap)
                if bias is not None:
                    logits = logits + bias[0, head, i]
                keep = allowed[b, i].nonzero().flatten()
                weights = torch.exp(logits[keep])
                sink = None if sinks is None else sinks[head] if sinks.dim() == 1 else sinks[b, head, i, 0]
                total = weights.sum() + (0 if sink is None else torch.exp(sink))
                out[b, i, head] = (weights / total) @ v[b, group, keep]
    return out


CAUSAL = torch.ones(S, S, dtype=torch.bool).tril().expand(B, S, S)
WINDOW = CAUSAL & torch.ones(S, S, dtype=torch.bool).triu(-2)
BIAS = torch.linspace(-1, 1, HEADS * S * S, dtype=torch.float64).reshape(1, HEADS, S, S)
SINKS = torch.linspace(-1, 1, HEADS, dtype=torch.float64)

SINKS_OF_QUERIES = torch.linspace(-1, 1, B * HEADS * S, dtype=torch.float64).reshape(B, HEADS, S, 1)


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize(
    ("allowed", "mask", "options"),
    [
        (CAUSAL, None, {}),
        (CAUSAL, None, {"scaling": 0.3}),
        (torch.ones(B, S, S, dtype=torch.bool), None, {"is_causal": False}),
        (WINDOW, WINDOW[:, None], {"sliding_window": 3}),
        (WINDOW, torch.where(WINDOW[:, None], 0.0, -1e9).double(), {}),
        (CAUSAL, None, {"softcap": 0.7}),
        (WINDOW, WINDOW[:, None], {"softcap": 0.7}),
        (CAUSAL, None, {"s_aux": SINKS}),
        (CAUSAL, None, {"sinks": SINKS_OF_QUERIES}),
        (WINDOW, WINDOW[:, None], {"sinks": SINKS_OF_QUERIES, "position_bias": BIAS}),
        (CAUSAL, None, {"position_bias": BIAS}),
        (WINDOW, WINDOW[:, None], {"position_bias": BIAS, "s_aux": SINKS, "softcap": 2.0, "scaling": 1.0}),
    ],
)
def test_values_and_gradients(groups, allowed, mask, options):
    q, k, v = tensors(groups)
    output, weights = attention_forward(Module(), q, k, v, mask, **options)
    names = {"position_bias": "bias", "s_aux": "sinks"} | {name: name for name in ("scaling", "softcap", "sinks")}
    want = by_hand(q, k, v, allowed, **{names[n]: value for n, value in options.items() if n in names})
    assert weights is None
    assert torch.allclose(output, want, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (output, want)]
    for one, two in zip(*gradients, strict=True):
        assert torch.allclose(one, two, rtol=1e-4, atol=1e-6)


def test_values_of_another_width():
    q, k, v = tensors(2, value_dim=5)
    output, _ = attention_forward(Module(), q, k, v, None)
    assert output.shape == (B, S, HEADS, 5)
    assert torch.allclose(output, by_hand(q, k, v, CAUSAL), rtol=1e-5, atol=1e-6)


def test_one_query_sees_the_whole_cache():
    q, k, v = tensors(2)
    output, _ = attention_forward(Module(), q[:, :, -1:], k, v, None)
    assert torch.allclose(output[:, 0], by_hand(q, k, v, CAUSAL)[:, -1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("softcap", [None, 0.7])
def test_a_query_that_may_attend_to_nothing_spoils_no_other(softcap):
    q, k, v = tensors(2)
    mask = CAUSAL.clone()
    mask[0, 0] = False
    output, _ = attention_forward(Module(), q, k, v, mask[:, None], softcap=softcap)
    assert output.isfinite().all()
    want = by_hand(q, k, v, CAUSAL, softcap=softcap)
    assert torch.allclose(output[0, 1:], want[0, 1:], rtol=1e-5, atol=1e-6)


def test_recomputed_it_is_the_same():
    module, (q, k, v) = Module(), tensors(2)
    plain, _ = attention_forward(module, q, k, v, None)
    module.megasched_attention = AttentionSettings(HEADS, sharded=False)
    module.megasched_attention.recompute = True
    again, _ = attention_forward(module, q, k, v, None)
    assert torch.equal(plain, again)
    for one, two in zip(*(torch.autograd.grad(o.sum(), (q, k, v)) for o in (plain, again)), strict=True):
        assert torch.equal(one, two)


def test_a_definition_that_counts_heads_by_itself_is_told():
    module, (q, k, v) = Module(), tensors(4)
    module.megasched_attention = AttentionSettings(HEADS // 2, sharded=True)
    with pytest.raises(
        MegaschedError, match=r"Module views 4 query heads where this rank holds 2: .*local_attributes"
    ):
        attention_forward(module, q, k, v, None)


def test_whole_heads_may_be_another_number_in_each_call():
    """Attention over earlier layers (Inkling 2) has the sequence in the place of heads."""
    module = Module()
    module.megasched_attention = AttentionSettings(None, sharded=False)
    (q, k, v) = tensors(HEADS)
    whole, _ = attention_forward(module, q, k, v, CAUSAL[:, None])
    half, _ = attention_forward(module, q[:, :2], k[:, :2], v[:, :2], CAUSAL[:, None])
    assert torch.allclose(half, whole[:, :, :2], rtol=1e-6, atol=1e-7)


def test_whether_a_definition_asks_for_attention_at_all():
    assert is_used(tiny_model("llama"))
    assert is_used(tiny_model("gpt2"))
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("bloom", vocab_size=9, hidden_size=8, n_layer=1, n_head=2)
    model = AutoModelForCausalLM.from_config(config)
    assert not is_used(model)
    assert model.config._attn_implementation != "megasched"


def test_selected_keys_alone_are_attended_to():
    """DeepSeek's sparse attention: of the keys that causality leaves, those whose indices are given."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 6, 4) for _ in range(3))
    indices = torch.stack([torch.randperm(6)[:2] for _ in range(12)]).view(2, 6, 2)
    indices[..., 0] = torch.arange(6)  # each query keeps itself
    found, _ = attention_forward(nn.Module(), q, k, v, None, indices=indices.int())
    logits = q @ k.transpose(2, 3) / 2
    allowed = torch.zeros(2, 6, 6, dtype=torch.bool).scatter(-1, indices, True).tril().unsqueeze(1)
    expected = logits.masked_fill(~allowed, -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(found, expected.transpose(1, 2))


def test_a_tensor_argument_that_is_not_known_is_refused():
    q = torch.zeros(1, 1, 2, 4)
    attention_forward(nn.Module(), q, q, q, None, position_ids=torch.zeros(1, 2), output_attentions=False)
    with pytest.raises(
        MegaschedError, match="Module calls attention with block_table, which megasched's attention"
    ):
        attention_forward(nn.Module(), q, q, q, None, block_table=torch.zeros(1))
