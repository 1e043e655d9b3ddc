"""Rotary functions that an attention module finds in its file, replaced for one instance alone."""

import functools
import inspect

import pytest
import torch
from megatron.core import jit
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from megasched.definition.small_models.small_models import causal_lm_types, small_config
from megasched.layers.fused import kernels, rotary
from tests import tiny


def _counted(monkeypatch):
    calls = []

    def by_one_kernel(function):
        def counted(*args, **kwargs):
            calls.append(function.__name__)
            return function(*args, **kwargs)

        return counted

    monkeypatch.setattr(rotary, "by_one_kernel", by_one_kernel)
    return calls


# Whole, partial and interleaved embeddings, and functions of other names.
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "glm", "cohere", "qwen3", "deepseek_v3"])
def test_each_layer_calls_it_and_numbers_stay(family, monkeypatch):
    calls = _counted(monkeypatch)
    torch.manual_seed(0)
    config = small_config(family)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(8)[None]
    before = model(ids).logits
    rotary.fuse_rotary(model, lambda path: True)
    assert calls == []
    assert torch.equal(model(ids).logits, before)
    assert len(calls) >= config.num_hidden_layers


def test_others_of_the_class_and_the_file_stay(monkeypatch):
    calls = _counted(monkeypatch)
    function = modeling_llama.apply_rotary_pos_emb
    torch.manual_seed(0)
    changed, other = (AutoModelForCausalLM.from_config(tiny.config("llama")) for _ in range(2))
    rotary.fuse_rotary(changed, lambda path: path.startswith("model.layers.0"))
    changed(torch.arange(4)[None])
    assert len(calls) == 1
    other(torch.arange(4)[None])
    assert len(calls) == 1
    assert modeling_llama.apply_rotary_pos_emb is function
    attention = changed.model.layers[0].self_attn
    assert inspect.signature(attention.forward) == inspect.signature(other.model.layers[0].self_attn.forward)


@pytest.fixture
def as_kernels(monkeypatch):
    """Takes the CPU for a GPU that compiles."""
    monkeypatch.setattr(kernels, "compiles", lambda device: True)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    yield
    rotary.by_one_kernel.cache_clear()


def test_a_gpu_compiles_where_the_trainer_does_and_nothing_forbids_it(monkeypatch):
    """``--disable-jit-fuser`` leaves Megatron another fuser."""
    gpu, config = torch.device("cuda"), torch._dynamo.config
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.setattr(jit, "jit_fuser", torch.compile)
    with config.patch(disable=False):
        assert kernels.compiles(gpu)
        assert not kernels.compiles(torch.device("cpu"))
        with config.patch(disable=True):
            assert not kernels.compiles(gpu)
        with monkeypatch.context() as patched:
            patched.setenv("TORCHDYNAMO_DISABLE", "1")
            assert not kernels.compiles(gpu)
        monkeypatch.setattr(jit, "jit_fuser", lambda function: function)
        assert not kernels.compiles(gpu)


def _laid_out(function, scaled=1.0):
    """What it makes of queries and keys, columns of one product; its gradient, and whether gradients lie alike."""
    generator = torch.Generator().manual_seed(0)
    joint = torch.randn(2, 6, (4 + 2 + 2) * 8, generator=generator, requires_grad=True)
    query, key, _ = (each.unflatten(-1, (-1, 8)).transpose(1, 2) for each in joint.split([32, 16, 16], dim=-1))
    orders = []
    for each in (query, key):
        each.register_hook(lambda gradient: orders.append(gradient.transpose(1, 2).is_contiguous()))
    cos, sin = (torch.randn(2, 6, 8, generator=generator) for _ in range(2))
    made = function(query, key, cos, sin)
    # Attention gives gradients back as they come, and also of another layout.
    sum((each.contiguous() * (scaled + each.detach())).sum() for each in made).backward()
    return made, joint.grad, orders


def _assert_equal_in_layout(function):
    made, gradient, orders = _laid_out(rotary.by_one_kernel(function))
    expected, of_expected, _ = _laid_out(function)
    for ours, theirs in zip(made, expected, strict=True):
        assert ours.transpose(1, 2).is_contiguous()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient, of_expected, rtol=0, atol=1e-6)
    assert orders == [True, True]


def test_results_and_gradients_lie_as_the_inputs_do(as_kernels, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)
    _assert_equal_in_layout(modeling_llama.apply_rotary_pos_emb)


@pytest.mark.slow
def test_so_they_do_compiled(as_kernels):
    with torch._dynamo.config.patch(disable=False):
        _assert_equal_in_layout(modeling_llama.apply_rotary_pos_emb)


def _types_by_rotary_function():
    """One type of each distinct rotary function, by its source: most files repeat Llama's."""
    found = {}
    for family in causal_lm_types():
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(small_config(family))
        except (ImportError, ValueError):  # it needs a package that is not here (timm), or is part of another
            continue
        for module in model.modules():
            for function in rotary._rotary_functions(inspect.unwrap(type(module).forward)).values():
                found.setdefault(inspect.getsource(function), family)
    return sorted(set(found.values()))


@pytest.mark.slow
def test_each_rotary_function_of_transformers_is_one_graph(as_kernels, monkeypatch):
    """What dynamo can't follow would be several kernels, or an error at the first step on a GPU."""
    whole = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", whole)
    families = _types_by_rotary_function()
    assert len(families) > 10
    ids = torch.arange(3, 19)[None]
    for family in families:
        torch.compiler.reset()  # a run has one of them
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(small_config(family)).eval()
        with torch.no_grad():
            before = model(ids, use_cache=False).logits
            rotary.fuse_rotary(model, lambda path: True)
            with torch._dynamo.config.patch(disable=False):
                after = model(ids, use_cache=False).logits
        torch.testing.assert_close(
            after, before, rtol=1e-5, atol=1e-5, msg=lambda said, of=family: f"{of}: {said}"
        )


def test_a_result_of_no_inputs_shape_stays(as_kernels, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)
    doubled = rotary.by_one_kernel(lambda x: torch.cat([x, x]))
    assert torch.equal(doubled(torch.arange(3.0)), torch.arange(3.0).repeat(2))


def _helper(x):
    return x + 1


def apply_rotary_here(x):
    return 2 * x


def _doubled(function):
    @functools.wraps(function)
    def doubled(*args, factor=2, **kwargs):
        return factor * function(*args, **kwargs)

    return doubled


@_doubled
def _decorated(x, *, more=1):
    return apply_rotary_here(_helper(x)) + more


def test_decorators_defaults_and_other_names_stay():
    rebound = rotary._with_globals(_decorated, {"apply_rotary_here": lambda x: 5 * x})
    assert _decorated(1) == 2 * (2 * 2 + 1)
    assert rebound(1) == 2 * (5 * 2 + 1)
    assert rebound(1, more=3, factor=1) == 5 * 2 + 3


def test_a_decorator_that_hides_its_function_is_left():
    def hidden(*args):
        return _decorated(*args)

    hidden.__wrapped__ = _helper
    assert rotary._with_globals(hidden, {"apply_rotary_here": abs}) is None
