"""Finds the MLPs that Megatron's own ``MLP`` can compute.

They are found by the numbers that small copies compute, not by the names of architectures.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from megasched.definition.instances import computes, tree_state, tried_once
from megasched.definition.linears import features, is_linear
from megasched.definition.undisturbed import undisturbed
from megasched.errors import Declined
from megasched.language.module_specs import ACTIVATIONS, MlpSpec

# Sizes of the copy: of the hidden state, and inside.
_HIDDEN, _INSIDE = 6, 10


def read_mlps(model: nn.Module) -> dict[str, MlpSpec | Declined]:
    """Returns each module that looks like an MLP by its path: its spec, or why Megatron's can't replace it.

    Such a module is in a list of layers, and consists of two or three linears without other parameters.
    """
    found: dict[str, MlpSpec | Declined] = {}
    known: dict[Any, MlpSpec | Declined] = {}
    for path, module in model.named_modules():
        name = _name_in_layer(path)
        linears = _linears(module) if name else {}
        if not linears:
            continue
        mlp = tried_once(known, tree_state(module), partial(_tried, module, linears))
        found[path] = mlp if isinstance(mlp, Declined) else _under(name, mlp)
    return found


def _name_in_layer(path: str) -> str:
    """Returns the part of a path after the number of a layer; empty if there is none.

    It is also empty for modules in a list within a layer, such as experts, each of which gets only some of the
    tokens.
    """
    parts = path.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[numbers[0] + 1 :]) if len(numbers) == 1 else ""


def _linears(module: nn.Module) -> dict[str, nn.Module]:
    """Returns a module's linears by name; none unless it consists of two or three and no other parameters."""
    found = {name: child for name, child in module.named_children() if is_linear(child)}
    inside = {id(parameter) for linear in found.values() for parameter in linear.parameters()}
    others = any(id(parameter) not in inside for parameter in module.parameters())
    return found if len(found) in (2, 3) and not others else {}


def _tried(module: nn.Module, linears: Mapping[str, nn.Module]) -> MlpSpec | Declined:
    """Returns the spec of an MLP in names relative to it, or the reason why Megatron's can't replace it."""
    if any(isinstance(part, nn.Dropout) and part.p > 0 for part in module.modules()):
        return Declined("it drops out in training, and Megatron's does not")
    reason = "it computes something else than Megatron's"
    with undisturbed(module), torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        for mlp in _forms(linears):
            small = _small(module, linears, mlp)
            x = torch.randn(2, 3, _HIDDEN, dtype=torch.float64)
            try:
                output = small(x)
            except Exception as error:  # whatever the definition's code raises
                reason = f"a small copy of it can't be tried: {type(error).__name__}: {error}"
                continue
            if not isinstance(output, torch.Tensor) or output.shape != x.shape:
                reason = "it returns something else than a hidden state"
                continue
            for activation in ACTIVATIONS:
                form = replace(mlp, activation=activation)
                if computes(small, partial(_computed, small, form), _HIDDEN):
                    return form
    return Declined(reason)


def _forms(linears: Mapping[str, nn.Module]) -> Iterator[MlpSpec]:
    """Yields the specs that fit the sizes of the linears."""
    for *inputs, down in permutations(linears):
        (hidden, inside), ends = features(linears[inputs[0]]), features(linears[down])
        if len(inputs) == 2 and ends == (inside, hidden) and features(linears[inputs[1]]) == (hidden, inside):
            yield MlpSpec(inputs[0], inputs[1], down)
        if len(inputs) == 1 and ends == (inside, hidden):
            yield MlpSpec("", inputs[0], down)
        if len(inputs) == 1 and (2 * ends[0], ends[1]) == (inside, hidden):
            yield MlpSpec("", "", down, inputs[0])


def _small(module: nn.Module, linears: Mapping[str, nn.Module], mlp: MlpSpec) -> Any:
    """Returns a copy with small linears, in training mode."""
    small = copy.copy(module)
    small.__dict__ = {**vars(module), "_modules": dict(module._modules), "training": True}
    inside = 2 * _INSIDE if mlp.gate_up else _INSIDE
    sizes = dict.fromkeys(mlp.inputs, (_HIDDEN, inside)) | {mlp.down: (_INSIDE, _HIDDEN)}
    for name, (inputs, outputs) in sizes.items():
        plain = nn.Linear(inputs, outputs, bias=linears[name].bias is not None, dtype=torch.float64)
        small._modules[name] = plain
    return small


def _computed(small: Any, mlp: MlpSpec, x: torch.Tensor) -> torch.Tensor:
    """Computes the MLP by Megatron's formula."""
    functions = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
        "relu": F.relu,
        "squared_relu": lambda gate: F.relu(gate).square(),
    }
    act = functions[mlp.activation]
    modules = small._modules
    if mlp.gate_up:
        gate, up = modules[mlp.gate_up](x).chunk(2, dim=-1)
        inside = act(gate) * up
    elif mlp.gate:
        inside = act(modules[mlp.gate](x)) * modules[mlp.up](x)
    else:
        inside = act(modules[mlp.up](x))
    return modules[mlp.down](inside)


def _under(path: str, mlp: MlpSpec) -> MlpSpec:
    """Returns the spec with names relative to the layer."""
    names = {field: getattr(mlp, field) for field in ("gate", "up", "down", "gate_up")}
    return replace(mlp, **{field: name and f"{path}.{name}" for field, name in names.items()})
