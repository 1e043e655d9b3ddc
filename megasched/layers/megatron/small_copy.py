"""Makes small copies of a definition's modules: the same instances, with all their state, but small parameters.

Only the features of the hidden state, and those inside an MLP or an expert, are reduced. The number and size of
heads, the number of experts and everything else stay, as do attributes, code and hooks.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from megasched.definition.linears import is_linear, output_axis
from megasched.language.module_specs import AttentionSpec, LayerSpec, MlpSpec, MoeSpec

HIDDEN, INSIDE, OF_EXPERTS, SHARED = 32, 24, 16, 40
# Where a matrix has values of this size, what it gives is of the size of what it is given.
_PRE_ACTIVATION = 4.0  # what activations are handed: clamps, and where approximations differ, are reached
# Attributes that count features of the hidden state or inside of an MLP.
_COUNTS = re.compile(
    r"(hidden|input|output|embed|intermediate|inter|ffn|expert|moe|model)?_*(hidden|intermediate)?_*(dim|size)"
)

_INSIDE = re.compile(r"inter|ffn|expert|moe")

Sizes = dict[str, tuple[int, ...]]


def copy_tree(module: nn.Module, other: Mapping[int, Any]) -> Any:
    """Returns a copy of a module and all its submodules, which shares parameters, buffers and attributes with it.

    Args:
        other: id of an attribute's value, or of a module -> its replacement.
    """
    if id(module) in other:
        return other[id(module)]
    made = type(module).__new__(type(module))
    for name, value in vars(module).items():
        if name == "_modules":
            own: Any = {key: None if child is None else copy_tree(child, other) for key, child in value.items()}
        elif name in ("_parameters", "_buffers"):
            own = dict(value)
        else:
            own = other.get(id(value), value)
        made.__dict__[name] = own
    return made


def attention_sizes(layer: nn.Module, attention: AttentionSpec) -> Sizes:
    """Returns the small shape of each parameter of a layer's attention, by its name in the layer."""
    latent = attention.mla
    inputs = attention.inputs if latent is None else attention.whole
    found = _all_of(layer, attention.module)
    found |= _of_linears(layer, inputs, inputs=HIDDEN)
    return found | _of_linears(layer, [attention.out], outputs=HIDDEN)


def mlp_sizes(layer: nn.Module, mlp: MlpSpec) -> Sizes:
    inside = 2 * INSIDE if mlp.gate_up else INSIDE
    found = _of_linears(layer, mlp.inputs, inputs=HIDDEN, outputs=inside)
    return found | _of_linears(layer, [mlp.down], inputs=INSIDE, outputs=HIDDEN)


def mixture_sizes(layer: nn.Module, mixture: MoeSpec) -> Sizes:
    found = _all_of(layer, mixture.module)
    routers = [name for name in (mixture.router, mixture.shared_gate) if name]
    for name in routers:
        weight = layer.get_parameter(f"{name}.weight")
        found[f"{name}.weight"] = (weight.shape[0], HIDDEN)
    expert = mixture.expert
    inside = 2 * OF_EXPERTS if expert.gated else OF_EXPERTS
    for own, name in expert.stacked.items():
        count = layer.get_parameter(f"{mixture.experts}.{name}").shape[0]
        first = own.startswith("linear_fc1")
        ends = (inside, HIDDEN) if first else (HIDDEN, OF_EXPERTS)
        matrix = tuple(reversed(ends)) if expert.transposed else ends
        found[f"{mixture.experts}.{name}"] = (count, *(matrix if own.endswith("weight") else ends[:1]))
    found |= _of_linears(layer, mixture.shared_inputs, inputs=HIDDEN, outputs=SHARED)
    return found | _of_linears(layer, mixture.shared_outputs, inputs=SHARED, outputs=HIDDEN)


def layer_sizes(layer: nn.Module, block: LayerSpec, mixture: MoeSpec | None) -> Sizes:
    found = attention_sizes(layer, block.attention)
    found |= mlp_sizes(layer, block.mlp) if mixture is None else mixture_sizes(layer, mixture)
    for norm in block.norms:
        found |= {f"{norm}.{name}": (HIDDEN,) for name, _ in layer.get_submodule(norm).named_parameters()}
    return found


def _all_of(layer: nn.Module, path: str) -> Sizes:
    """Returns the unchanged shapes of all parameters of a module."""
    return {f"{path}.{name}": tuple(held.shape) for name, held in layer.get_submodule(path).named_parameters()}


def _of_linears(layer: nn.Module, names: Iterable[str], inputs: int = 0, outputs: int = 0) -> Sizes:
    """Returns the shapes of linears with other numbers of features; 0 keeps the number."""
    found: Sizes = {}
    for name in names:
        linear: Any = layer.get_submodule(name)
        out = output_axis(linear)
        shape = list(linear.weight.shape)
        shape[out], shape[1 - out] = outputs or shape[out], inputs or shape[1 - out]
        found[f"{name}.weight"] = tuple(shape)
        if getattr(linear, "bias", None) is not None:
            found[f"{name}.bias"] = (shape[out],)
    return found


def make_small(layer: nn.Module, sizes: Sizes, attention: str) -> None:
    """Gives a copy of a layer small parameters with random values, in float32, and values to its buffers.

    Args:
        layer: result of ``copy_tree``, or a copy of one module in the layer under its path.
        sizes: shapes of all parameters that are used, by their names.
        attention: path of its attention, in which attributes that count features count those of all heads; empty:
            there is none.
    """
    generator = torch.Generator().manual_seed(0)
    counted = _counted(layer, sizes)
    for path, module in layer.named_modules():
        for name, held in module._parameters.items():
            full = f"{path}.{name}" if path else name
            if held is not None and full in sizes:
                module._parameters[name] = nn.Parameter(_values(full, sizes[full], module, generator))
        for name, buffer in module._buffers.items():
            if buffer is not None and (buffer.is_meta or (buffer.is_floating_point() and not buffer.any())):
                # Corrections of routers are zeros at first, and trained to be others.
                module._buffers[name] = torch.linspace(-0.3, 0.3, buffer.numel()).reshape(buffer.shape)
        if not _inside(path, attention):
            for name, value in list(vars(module).items()):
                if type(value) is int and value in counted and _COUNTS.fullmatch(name):
                    module.__dict__[name] = _count(name, counted[value])
        _set_size(module)


def _inside(path: str, outer: str) -> bool:
    return bool(outer) and f"{path}.".startswith(f"{outer}.")


def _counted(layer: nn.Module, sizes: Sizes) -> dict[int, set[int]]:
    """Maps each number of features to those of the copy; two if it occurs both inside and outside of an MLP."""
    found: dict[int, set[int]] = defaultdict(set)
    for name, held in layer.named_parameters():
        for old, new in zip(held.shape, sizes.get(name, ()), strict=False):
            found[old].add(new)
    return found


def _count(name: str, counts: set[int]) -> int:
    """Returns which of the numbers an attribute of that name counts."""
    inside = counts - {HIDDEN}
    return HIDDEN if HIDDEN in counts and not (inside and _INSIDE.match(name)) else min(inside)


def _values(name: str, shape: tuple[int, ...], module: nn.Module, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=generator)
    if len(shape) == 1 and name.endswith("weight"):
        return 1 + 0.2 * values  # a norm's, whether it is kept less 1 or not
    if len(shape) == 1:
        return 0.3 * values
    if len(shape) == 3:
        inputs = shape[1] if getattr(module, "is_transposed", False) else shape[2]
    else:
        inputs = shape[1 - output_axis(module)] if is_linear(module) else shape[-1]
    gain = _PRE_ACTIVATION if _feeds_activation(name) else 1.0
    return gain * values / inputs**0.5


def _feeds_activation(name: str) -> bool:
    return any(part in name for part in ("gate_up", "gate_proj", "up_proj", "c_fc", "fc1", "h_to_4h"))


def _set_size(module: Any) -> None:
    """Updates the sizes that modules of torch and HF store beside their weight and compute with."""
    weight = module._parameters.get("weight")
    if weight is None:
        return
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        module.normalized_shape = tuple(weight.shape)
    if is_linear(module):
        out = output_axis(module)
        names = ("nx", "nf") if out == 1 else ("in_features", "out_features")
        module.__dict__.update(zip(names, (weight.shape[1 - out], weight.shape[out]), strict=True))


def replaced_in(config: Any, field: Callable[[str, Any], Any]) -> Any:
    """Returns a copy of a config with each field replaced by ``field(name, value)``."""
    made = copy.copy(config)
    made.__dict__ = {name: field(name, value) for name, value in vars(config).items()}
    return made
