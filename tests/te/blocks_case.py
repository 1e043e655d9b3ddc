"""Run in a process of its own by test_blocks.py: a decoder layer as Transformer Engine's modules, beside HF's."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from typing import Any

import torch

from tests.te import plain


def main() -> None:
    plain.install()
    from megasched.patches import host_cuda

    host_cuda.install(force=True)  # Megatron's dispatcher asks for streams
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None  # a kernel of its own for the router
    parallel_state.initialize_model_parallel()
    random.get_cuda_rng_tracker().fork = lambda *args, **kwargs: nullcontext()  # it would seed a GPU
    print(json.dumps({family: compare(family) for family in sys.argv[1:]}))


CHANGES = {"seed_oss": {"attention_out_bias": True, "mlp_bias": True}}
LAYER = {"smollm3": 1}  # without positions and in a window; else the first
WINDOWS = {"mistral": 5, "smollm3": 5}


def compare(family: str) -> dict[str, Any]:
    """Classes in the layer (in its mixture where the layer stays HF's), names of its parameters, and the distances
    of output and gradients from HF's."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    import megasched
    from megasched.inference.infer import infer_roles
    from megasched.lowering import block, mixture
    from megasched.lowering.context import Context
    from megasched.lowering.planning import make_plan
    from megasched.model_adapters.default_schedule import schedule as default
    from megasched.model_adapters.registry import roles_of
    from megasched.roles import Block
    from megasched.trial.structure import find_structure
    from tests.lowering.models import tiny_model

    model = tiny_model(family, tie_word_embeddings=False, **CHANGES.get(family, {}))
    model.config.use_cache = False
    roles = infer_roles(model, roles_of(model), find_structure(model), tp=1)
    sch = megasched.create_schedule(model, roles=roles)
    default(sch, sch.layout)
    whole = isinstance(roles.block, Block)
    sch["model.layers.*" if whole else "model.layers.*.mlp"].level("block")
    plan = make_plan(sch, causal_lm=True)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=model.config.hidden_size,
        ffn_hidden_size=model.config.intermediate_size,
        num_attention_heads=model.config.num_attention_heads,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
    )
    group = parallel_state.get_tensor_model_parallel_group()
    context = Context(plan, group, config, None, torch.device("cpu"), megatron_finalizes=True)
    block.uses_transformer_engine = mixture.uses_transformer_engine = lambda device: True
    path = f"model.layers.{LAYER.get(family, 0)}" + ("" if whole else ".mlp")
    old = model.get_submodule(path)
    hidden = torch.randn(2, 12, model.config.hidden_size)
    arguments: dict[str, Any] = {}
    if whole:
        angles = block.rotary_angles(model.model.rotary_emb)
        new = block.lower_block(path, old, model, sch.roles, angles, context)
        mask = block.window_mask(WINDOWS.get(family, 12), 12, torch.device("cpu"))
        arguments["attention_mask"] = None if mask is None else mask[None, None]
        arguments["position_embeddings"] = model.model.rotary_emb(hidden, torch.arange(12)[None])
    else:
        new = mixture.lower_mixture(path, model, sch.roles.mixture, context)
    outputs = []
    for module in (old, new):
        x = hidden.clone().requires_grad_()
        output = module(x, **arguments)
        output = output[0] if isinstance(output, tuple) else output
        (output * torch.linspace(0.5, 1.5, output.numel()).view_as(output)).sum().backward()
        outputs.append((output.detach(), x.grad))
    distances = {f"output {i}": gap(a, b) for i, (b, a) in enumerate(zip(*outputs, strict=True))}
    gradients: dict[str, list[torch.Tensor]] = {}
    for name, parameter in new.named_parameters():
        assembly = context.assemblies[f"{path}.{name}"]
        for part, gradient in zip(assembly.parts, assembly.split(parameter.grad, 1), strict=True):
            gradients.setdefault(part.name, []).append(gradient)
    for name, pieces in gradients.items():  # experts come one by one
        distances[name] = gap(torch.cat(pieces), model.get_parameter(name).grad)
    expected = {f"{path}.{name}" for name, _ in old.named_parameters()}
    return {
        "classes": sorted({type(module).__name__ for module in new.modules()}),
        "missing": sorted(expected - set(distances)),
        "distances": distances,
    }


def gap(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-3))


if __name__ == "__main__":
    main()
