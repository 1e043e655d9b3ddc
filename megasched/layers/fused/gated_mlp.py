"""Computes ``activation(gate) * up`` from the one output of both projections, which is parted in neither pass.

Definitions write ``down(activation(gate(x)) * up(x))``. With gate and up computed by one product, parting its
output costs a copy of its gradient, and activation and product read and write the widest tensors of a layer three
times. Here one kernel reads the joint output, and one writes its gradient. For the backward the joint output alone
is kept, as Megatron does (``core/fusions/fused_bias_swiglu.py``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from megasched.definition.instances import comparable_state, computes, is_of_transformers, real_tensors, tried_once
from megasched.layers.fused.activations import ACTIVATIONS
from megasched.layers.fused.kernels import one_kernel
from megasched.layers.fused_columns import SharedProduct
from megasched.layers.wrap import WAITING, Forward, takes_any_name, wrap_forward

_HIDDEN, _INNER = 6, 10  # sizes of a trial


class GatedMlp(NamedTuple):
    """Names an MLP's children, and its activation."""

    gate: str
    up: str
    down: str
    activation: str


_TRIED: dict[Any, GatedMlp | None] = {}


def fuse_gates(model: nn.Module, columns: Iterable[tuple[str, ...]], here: Callable[[str], bool]) -> set[str]:
    """Makes MLPs whose gate and up are one product compute what follows it by one kernel; returns their paths.

    Modules and parameters stay. A trial with numbers shows that an MLP's code computes just that.

    Args:
        columns: paths of the columns of each product (``Plan.fused_columns``).
        here: holds for a path whose module may be changed, and its children's code left out.
    """
    fused: set[str] = set()
    for paths in columns:
        parents = {path.rpartition(".")[0] for path in paths}
        if len(paths) != 2 or len(parents) != 1:
            continue
        (parent,) = parents
        if not here(parent):  # where there may be none, as of other stages
            continue
        module = model.get_submodule(parent)
        names = tuple(path.rpartition(".")[2] for path in paths)
        if "forward" in vars(module) or not is_of_transformers(module):
            continue
        mlp = tried_once(_TRIED, _state(module, names), partial(_gated_mlp, module, names))
        if mlp is not None:
            wrap_forward(module, takes_any_name(_fused(module, mlp)))
            fused.add(parent)
    return fused


def _state(module: nn.Module, names: tuple[str, ...]) -> Any:
    own = comparable_state(module)
    others = [comparable_state(child) for name, child in module.named_children() if not _is_linear(child)]
    if own is None or None in others:
        return None
    biased = [(name, _has_bias(child)) for name, child in module.named_children() if _is_linear(child)]
    return own, tuple(others), names, tuple(biased)


def _is_linear(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2


def _has_bias(module: nn.Module) -> bool:
    return module._parameters.get("bias") is not None


def _gated_mlp(module: nn.Module, names: tuple[str, ...]) -> GatedMlp | None:
    """Returns which child is which, and the activation, if the module computes a gated MLP."""
    linears = [name for name, child in module.named_children() if _is_linear(child)]
    if len(linears) != 3 or not set(names) < set(linears):
        return None
    (down,) = set(linears) - set(names)
    small = _small(module, names, down)
    for activation in ACTIVATIONS:
        for gate, up in (names, names[::-1]):
            mlp = GatedMlp(gate, up, down, activation)
            if computes(small, partial(_by_formula, small, mlp), _HIDDEN):
                return mlp
    return None


def _small(module: nn.Module, names: tuple[str, ...], down: str) -> nn.Module:
    """Returns a copy of the module with small linears, in float64 on the CPU."""
    with real_tensors(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = {
            name: nn.Linear(
                *((_INNER, _HIDDEN) if name == down else (_HIDDEN, _INNER)),
                bias=_has_bias(module.get_submodule(name)),
                dtype=torch.float64,
            )
            for name in (*names, down)
        }
    small = copy.copy(module)
    small.__dict__ = {**vars(module), "_modules": {**module._modules, **made}}
    return small


def _by_formula(small: nn.Module, mlp: GatedMlp, x: torch.Tensor) -> torch.Tensor:
    gate, up, down = (small.get_submodule(name) for name in mlp[:3])
    return down(ACTIVATIONS[mlp.activation].forward(gate(x)) * up(x))


def _fused(module: Any, mlp: GatedMlp) -> Callable[[Forward, torch.Tensor], Any]:
    gate, down = module.get_submodule(mlp.gate), module.get_submodule(mlp.down)
    product: SharedProduct = gate.fused_columns
    passed_by = [child for child in module.children() if child is not down]

    def fused(forward: Forward, x: torch.Tensor) -> Any:
        joint = product.output(x) if x.dim() in (2, 3) and all(map(_bare, passed_by)) else None
        if joint is None or len(set(joint.sizes)) > 1:
            return forward(x)
        return down(GatedActivation.apply(joint.output, mlp.activation, joint.order[0] is gate))

    return fused


def _bare(module: nn.Module) -> bool:
    """Returns whether calling a module runs its class's forward alone: no wrapper of ours, no hook that does more.

    The product waits for the parameters of its members itself.
    """
    return "forward" not in vars(module) and not WAITING.is_hooked(module)


class GatedActivation(torch.autograd.Function):
    """Maps the joint output of gate and up, [..., 2 f], to ``activation(gate) * up``, [..., f].

    Its last arguments are the activation's name in ``ACTIVATIONS``, and whether the gate's features come first.
    """

    @staticmethod
    def forward(ctx: Any, joint: torch.Tensor, activation: str, gate_first: bool) -> torch.Tensor:
        ctx.save_for_backward(joint)
        ctx.of = activation, gate_first
        return one_kernel(_forward)(joint, activation, gate_first)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (joint,) = ctx.saved_tensors
        return one_kernel(_backward)(gradient, joint, *ctx.of), None, None


def _forward(joint: torch.Tensor, activation: str, gate_first: bool) -> torch.Tensor:
    gate, up = _halves(joint, gate_first)
    return ACTIVATIONS[activation].forward(gate) * up


def _backward(gradient: torch.Tensor, joint: torch.Tensor, activation: str, gate_first: bool) -> torch.Tensor:
    gate, up = _halves(joint, gate_first)
    function = ACTIVATIONS[activation]
    of_gate, of_up = function.backward(gradient * up, gate), gradient * function.forward(gate)
    return torch.cat([of_gate, of_up] if gate_first else [of_up, of_gate], dim=-1)


def _halves(joint: torch.Tensor, gate_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = joint.chunk(2, dim=-1)
    return (first, second) if gate_first else (second, first)
