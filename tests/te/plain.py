"""Transformer Engine on a machine without a GPU: its real Python modules, with plain torch where its kernels are.

For tests of structure, weights and gradients, not of the kernels. It must be installed in a process of its own: an
importable Transformer Engine changes what Megatron picks everywhere (optimizer, norms, clipping). It leans on
the inside of the version that requirements.txt pins: when a later one breaks it, adapt ``install`` first.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import types
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tests.parity.instances import in_a_trial

EXTENSION = "transformer_engine_torch"


class _Numbered(type):
    """A class whose attributes are numbers, made up when they are asked for: stands for a C++ enumeration."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("_"):
            raise AttributeError(name)
        cls.__members__[name] = len(cls.__members__)
        setattr(cls, name, cls.__members__[name])
        return cls.__members__[name]


class _Extension(types.ModuleType):
    """The compiled extension: enumerations are there, functions say that they are not."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            found: Any = _Numbered(name, (), {"__members__": {}})
        else:

            def found(*args: Any, **kwargs: Any) -> Any:
                raise RuntimeError(f"{EXTENSION}.{name} was called, and its kernels are not here")

        setattr(self, name, found)
        return found


def install() -> Any:
    """Makes ``transformer_engine.pytorch`` importable, its modules constructible on the CPU, their forwards plain.

    Returns:
        The module ``transformer_engine.pytorch``.
    """
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # its common package loads no shared library then
    sys.modules[EXTENSION] = _Extension(EXTENSION)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it can't load its own pytorch part
        import transformer_engine
        import transformer_engine.common as common
    common.load_framework_extension = lambda framework: None
    for name in [name for name in sys.modules if name.startswith("transformer_engine.pytorch")]:
        del sys.modules[name]
    te = transformer_engine.pytorch = importlib.import_module("transformer_engine.pytorch")
    torch.cuda.is_available = lambda: True  # its constructors ask, and need nothing else of a GPU
    torch.cuda.current_device = lambda: torch.device("cpu")
    _allow_8_bits()
    te.Linear.forward = _linear
    te.LayerNormLinear.forward = _norm_linear
    te.GroupedLinear.forward = _grouped_linear
    te.RMSNorm.forward = lambda self, x, *args, **kwargs: _norm(self, "RMSNorm", x, self.weight)
    te.LayerNorm.forward = lambda self, x, *args, **kwargs: _norm(self, "LayerNorm", x, self.weight, self.bias)
    te.DotProductAttention.__init__ = _on_cpu(te.DotProductAttention.__init__)
    te.DotProductAttention.forward = _on_cpu(_attention)
    return te


class _OnCpu(TorchFunctionMode):
    """Tensors that are to be made on a GPU are made on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def _on_cpu(function: Any) -> Any:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _OnCpu():
            return function(*args, **kwargs)

    return run


def _allow_8_bits() -> None:
    """Contexts of 8-bit training can be entered, and a recompute in one; what it computes stays plain."""
    from transformer_engine.pytorch import distributed, quantization

    for name in ("_FP8_SUPPORT", "_MXFP8_SUPPORT", "_FP8_BLOCK_SCALING_SUPPORT"):
        setattr(quantization, name, (True, ""))
    distributed._get_cuda_rng_state = distributed._set_cuda_rng_state = lambda *args, **kwargs: None


@dataclass(frozen=True)
class Product:
    """One call of a linear of Transformer Engine's.

    Attributes:
        recipe: class of the 8-bit recipe that was in force; empty in 16 bits.
        features: (out, in) of the weight on this rank.
        first: whether it was said to be the first micro-batch, after which weights in 8 bits are kept.
        joined: the weight was made of several parameters, and without a copy.
    """

    recipe: str
    features: tuple[int, int]
    first: bool | None
    joined: bool


products: list[Product] = []


def _linear(self: Any, x: torch.Tensor, is_first_microbatch: bool | None = None, **kwargs: Any) -> Any:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as State

    weight, bias = self._get_weight_and_bias_tensors()  # the real ones, so that several parameters become one
    recipe = type(State.get_fp8_recipe()).__name__ if State.is_fp8_enabled() else ""
    parts = [getattr(self, name) for name in self.weight_names]
    joined = len(parts) > 1 and weight.data_ptr() == parts[0].data_ptr()
    if not in_a_trial():
        products.append(Product(recipe, tuple(weight.shape), is_first_microbatch, joined))
    output = F.linear(x, weight, bias if self.use_bias and not self.return_bias else None)
    return (output, bias if self.use_bias else None) if self.return_bias else output


def _norm_linear(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    assert not self.return_layernorm_output
    normed = _norm(self, self.normalization, x, self.layer_norm_weight, self.layer_norm_bias)
    return _linear(self, normed, **kwargs)


def _norm(self: Any, kind: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    weight = weight + 1 if self.zero_centered_gamma else weight
    if kind == "RMSNorm":
        return F.rms_norm(x, weight.shape, weight, self.eps)
    return F.layer_norm(x, weight.shape, weight, bias, self.eps)


def _grouped_linear(
    self: Any, x: torch.Tensor, m_splits: Any, is_first_microbatch: bool | None = None, **kwargs: Any
) -> Any:
    counts = m_splits if isinstance(m_splits, list) else m_splits.tolist()
    weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
    biases = [getattr(self, f"bias{i}") if self.use_bias else None for i in range(self.num_gemms)]
    added = biases if self.apply_bias else [None] * self.num_gemms
    parts = zip(x.split(counts), weights, added, strict=True)
    output = torch.cat([F.linear(part, weight, bias) for part, weight, bias in parts])
    return (output, biases) if self.return_bias else output


layouts: list[str] = []


def _layout(qkv_format: str, *qkv: torch.Tensor) -> Any:
    """How Transformer Engine takes q, k and v to lie, which is all that its kernels go by, and what they get."""
    from transformer_engine.pytorch.attention.dot_product_attention.utils import get_qkv_layout

    layout, *tensors, _, _ = get_qkv_layout(*qkv, qkv_format=qkv_format)
    layouts.append(layout)
    if layout == "_".join([qkv_format] * 3):
        for t in tensors:
            assert t.stride() == torch.empty(t.shape, device="meta").stride(), (layout, t.shape, t.stride())
    return layout, *tensors


def _attention(
    self: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    qkv_format: str | None = None,
    attn_mask_type: str | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Transformer Engine's own plain operations, which it takes where it has no kernel."""
    layout, query, key, value = _layout(qkv_format or self.qkv_format, query, key, value)
    sinks = None if self.softmax_offset is None else self.softmax_offset.reshape(1, -1, 1, 1).float()
    return self.unfused_attention(
        {},
        query,
        key,
        value,
        qkv_layout=layout,
        attn_mask_type=attn_mask_type or self.attn_mask_type,
        window_size=self.window_size,
        softcap=self.softcap,
        softmax_offset=sinks,
    )
