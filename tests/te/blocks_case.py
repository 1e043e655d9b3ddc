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
    from megatron.core import jit

    jit.disable_jit_fuser()  # its kernels are functions that are compiled where they are imported
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None  # a kernel of its own for the router
    parallel_state.initialize_model_parallel()
    random.get_cuda_rng_tracker().fork = lambda *args, **kwargs: nullcontext()  # it would seed a GPU
    print(json.dumps({family: compare(family) for family in sys.argv[1:]}))


CHANGES = {
    "seed_oss": {"attention_out_bias": True, "mlp_bias": True},
    "qwen3_next": {"layer_types": ["full_attention", "linear_attention"]},
}
LAYER = {"smollm3": 1}  # without positions and in a window; else the first


def compare(family: str) -> dict[str, Any]:
    """Classes in the layer (where it stays HF's, in its mixture or MLP, or in the module whose name follows a
    colon), names of its parameters, and the distances of output and gradients from HF's."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    import megasched
    from megasched.analysis.find_layer_stack import find_layer_stack
    from megasched.analysis.roles.infer import infer_roles
    from megasched.language.module_specs import LayerSpec
    from megasched.layers import attention
    from megasched.layers.build_context import BuildContext
    from megasched.layers.megatron import attention as self_attention
    from megasched.layers.megatron import layer as whole_layer
    from megasched.layers.megatron import mlp, moe
    from megasched.layers.megatron.rotary import rotary_angles
    from megasched.layers.megatron.trials import Trials
    from megasched.model_adapters.default_schedule import schedule as default
    from megasched.model_adapters.registry import roles_of
    from megasched.plan.make import make_plan
    from megasched.verify.reference import FLOOR, relative

    number = LAYER.get(family, 0)
    family, _, name = family.partition(":")
    model = _model(family)
    model.config.use_cache = False
    attention.enable(model)
    structure = find_layer_stack(model)
    roles = infer_roles(model, roles_of(model), structure, tp=1)
    sch = megasched.create_schedule(model, roles=roles)
    default(sch, sch.layout)
    whole = isinstance(roles.layer, LayerSpec) and not name
    layer = structure.layer_path(number)
    path = layer if whole else f"{layer}.{name or 'mlp'}"
    sch[layer].level("fused")
    sch[path].level("block")
    plan = make_plan(sch, causal_lm=True, trials=Trials)
    model.set_attn_implementation("eager")  # what it is compared with is HF's own
    config = TransformerConfig(
        num_layers=2,
        hidden_size=model.config.hidden_size,
        num_attention_heads=model.config.num_attention_heads,
        use_cpu_initialization=True,
        bias_activation_fusion=True,
    )
    group = parallel_state.get_tensor_model_parallel_group()
    context = BuildContext(plan, group, config, None, torch.device("cpu"), megatron_finalizes=True)
    for module in (whole_layer, moe, mlp, self_attention):
        module.uses_transformer_engine = lambda device: True
    old = model.get_submodule(path)
    hidden, others, arguments = _call(model, old)
    if whole:
        known = rotary_angles(model, sch.roles.layer.attention, None)
        new = whole_layer.lower_block(path, old, model, known, context)
    elif path in plan.attentions:
        known = rotary_angles(model, sch.roles.attention, None)
        new = self_attention.lower_attention(path, model, sch.roles.attention, known, context)
    elif path in plan.mlps:
        new = mlp.lower_mlp(path, model, context)
    else:
        new = moe.lower_mixture(path, model, sch.roles.moe, context)
    outputs = []
    for module in (old, new):
        x = hidden.clone().requires_grad_()
        output = module(x, *others, **arguments)
        output = output[0] if isinstance(output, tuple) else output
        (output * torch.linspace(0.5, 1.5, output.numel()).view_as(output)).sum().backward()
        outputs.append((output.detach(), x.grad))
    distances = {f"output {i}": relative(a, b) for i, (b, a) in enumerate(zip(*outputs, strict=True))}
    gradients: dict[str, list[torch.Tensor]] = {}
    for name, parameter in new.named_parameters():
        assembly = context.assemblies[f"{path}.{name}"]
        for part, gradient in zip(assembly.parts, assembly.split(parameter.grad, 1), strict=True):
            upright = gradient.t() if part.transposed and gradient.dim() > 1 else gradient
            gradients.setdefault(part.name, []).append(upright)
    wanted = {name: model.get_parameter(name).grad for name in gradients}
    # A key bias has no gradient (softmax does not see it): what is there is rounding, measured against the rest.
    floor = FLOOR * max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, pieces in gradients.items():  # experts come one by one
        distances[name] = relative(torch.cat(pieces), wanted[name], floor)
    expected = {f"{path}.{name}" for name, _ in old.named_parameters()}
    return {
        "classes": sorted({type(module).__name__ for module in new.modules()}),
        "missing": sorted(expected - set(distances)),
        "distances": distances,
    }


def _model(family: str) -> Any:
    """Two layers, every parameter random."""
    from transformers import AutoModelForCausalLM

    from megasched.definition.small_models.small_models import small_config
    from tests import tiny
    from tests.lowering.models import randomize, tiny_model

    if family in {**tiny.FAMILIES, **tiny.BLOCKS, **tiny.MIXTURES}:
        return tiny_model(family, tie_word_embeddings=False, **CHANGES.get(family, {}))
    return randomize(AutoModelForCausalLM.from_config(small_config(family), dtype=torch.float32)).train()


def _call(model: Any, module: Any) -> tuple[torch.Tensor, list[Any], dict[str, Any]]:
    """Hidden state and other arguments that the model gives one of its modules."""
    from tests.lowering.models import token_ids

    found: list[Any] = []
    handle = module.register_forward_pre_hook(lambda _, *given: found.extend(given), with_kwargs=True)
    with torch.no_grad():
        model(token_ids())
    handle.remove()
    others, named = list(found[0]), dict(found[1])
    hidden = others.pop(0) if others else named.pop("hidden_states")
    return hidden, others, named


if __name__ == "__main__":
    main()
