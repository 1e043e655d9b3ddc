"""Fills Megatron's own modules with the definition's weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from megasched.layers.build_context import BuildContext
from megasched.plan.megatron.params import ROUTER, ROUTER_BIAS, SINKS
from megasched.plan.param_mapping import ParamMapping

# Ends of names of Megatron's parameters that may be in float32 in a layer of half precision: what computes with
# them takes them so (``router_gating_linear`` in megatron/core/transformer/moe/moe_utils.py), or is ours.
MAY_BE_FLOAT32 = (ROUTER, ROUTER_BIAS, SINKS)


def fill_module(
    path: str, layer: nn.Module, known: dict[str, ParamMapping], model: nn.Module, context: BuildContext
) -> None:
    """Fills the parameters of Megatron's module, which will be ``layer`` of the module at ``path``.

    Args:
        known: name of its parameter -> the HF tensors that it is made of.

    Raises:
        RuntimeError: a parameter of Megatron's module has no known HF tensor, or an HF tensor no parameter.
    """
    own: dict[str, Any] = dict(layer.named_parameters())
    unknown = own.keys() - known.keys()
    if unknown:
        raise RuntimeError(f"{path}: nothing is known of {', '.join(sorted(unknown))} in Megatron's layer")
    left = {part.name for assembly in known.values() for part in assembly.parts}
    # Entries of one tensor one after the other: where values are made, the whole tensor is.
    for name in sorted(own, key=lambda name: known[name].name):
        parameter, assembly = own[name], known[name]
        left -= {part.name for part in assembly.parts}
        context.assemblies[f"{path}.layer.{name}"] = assembly
        if assembly.name in context.float32 and name.endswith(MAY_BE_FLOAT32):
            parameter.data = parameter.data.float()
        context.fill_mapped(parameter, assembly, [model.get_parameter(part.name) for part in assembly.parts])
        if assembly.entry is not None:
            # Whole, as at the other levels: Megatron would sum it over TP x DP as well where EP is 1.
            parameter.tensor_model_parallel = False
            parameter.allreduce = assembly.parts[0].group != "ep"
    if left:
        raise RuntimeError(f"{path}: Megatron's layer has no parameter for {', '.join(sorted(left))}")
