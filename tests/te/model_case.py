"""Run by test_fp8.py, one process a rank: whole models with Transformer Engine's modules, beside HF.

Arguments: rank, world size, a file for the store, and cases as JSON (the keyword arguments of ``compare``).
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch

from tests.te import plain

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2}
BATCH, LENGTH = 2, 16


def main(rank: int, world: int, store: str, cases: list[dict[str, Any]]) -> None:
    plain.install()
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(store, world), rank=rank, world_size=world
    )
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    from megasched.layers import attention
    from megasched.layers.megatron import attention as self_attention
    from megasched.layers.megatron import layer

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    random.get_cuda_rng_tracker().fork = lambda *args, **kwargs: nullcontext()  # it would seed a GPU
    attention.register()
    for module in (layer, self_attention):
        module.uses_transformer_engine = lambda device: True
    found = [(overlapping if case.pop("overlap", False) else compare)(**case) for case in cases]
    if rank == 0:
        print(json.dumps(found))


def compare(
    family: str,
    fp8: dict[str, Any] | None = None,
    changes: dict[str, Any] | None = None,
    sequence_parallel: bool = False,
    calls: str = "",
    config: dict[str, Any] | None = None,
    distributed_optimizer: bool = False,
) -> dict[str, Any]:
    """What a model's linears were called with, and the distances of loss and gradients from HF's.

    Args:
        fp8: fields of ``Fp8``.
        changes: of the HF config.
        calls: Python lines that call more primitives on ``sch``.
        config: more of Megatron's.
        distributed_optimizer: Megatron's buffers are laid out for it.
    """
    from megasched.weights.source import materialize

    model, definition, source = build(family, fp8, changes or {}, sequence_parallel, calls, config or {})
    chunk = in_buffers(model, distributed_optimizer)
    generator = torch.Generator().manual_seed(3)
    tokens, labels = (torch.randint(4, 99, (BATCH, LENGTH), generator=generator) for _ in range(2))
    steps = []
    for _ in range(2):  # micro-batches of one step
        plain.products.clear()
        if not steps:
            chunk.set_is_first_microbatch()
        loss = chunk(tokens, labels=labels).mean()
        forward = len(plain.products)
        loss.backward()
        steps.append({"forward": forward, "products": [asdict(product) for product in plain.products]})
    reference = materialize(definition, source).train()
    expected = torch.nn.functional.cross_entropy(
        reference(input_ids=tokens).logits.flatten(0, 1).float(), labels.flatten()
    )
    expected.backward()
    gradients = {name: 2 * p.grad for name, p in reference.named_parameters()}
    entries = model.sharded_state_dict()
    # What a checkpoint of Megatron's other format would hold; a tie is there once.
    state = {k: v for k, v in model.state_dict().items() if k in entries or k.endswith("_extra_state")}
    return {
        "classes": classes(model),
        "steps": steps,
        "loss": abs(float(loss.detach() - expected.detach())) / float(expected.detach()),
        "distances": {name: gap(got, gradients[name]) for name, got in whole_gradients(model).items()},
        "missing": sorted(set(gradients) - set(whole_gradients(model))),
        "entries": sorted(entries),
        "reload": str(model.load_state_dict(state)),
    }


def overlapping(**case: Any) -> dict[str, Any]:
    """Linear of a layer -> name of its communication buffer and what it overlaps."""
    from transformer_engine.pytorch.module import layernorm_linear, linear

    for module in (linear, layernorm_linear):  # Megatron's trainer has initialised the buffers by then
        module.is_ub_initialized = lambda: True
        module.using_cublasmp_backend = lambda: False
    model, *_ = build(
        case["family"], None, {}, True, "", {"tp_comm_overlap": True}, more_layout={"tp_comm_overlap": True}
    )
    kinds = ("ub_overlap_ag_fprop", "ub_overlap_rs_fprop", "ub_overlap_ag_dgrad", "ub_bulk_wgrad", "ub_bulk_dgrad")
    return {
        name.partition(".layer.")[2]: [module.ub_name, *(kind for kind in kinds if getattr(module, kind, False))]
        for name, module in model.definition.named_modules()
        if getattr(module, "ub_name", None) and ".layers.1." in name
    }


def build(
    family: str,
    fp8: dict[str, Any] | None,
    changes: dict[str, Any],
    sequence_parallel: bool,
    calls: str,
    more: dict[str, Any],
    more_layout: dict[str, Any] | None = None,
) -> tuple[Any, Any, Any]:
    """A ``ScheduledModel``, its definition on meta, and where its weights are from."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    import megasched
    from megasched.definition import attention_interface
    from megasched.definition.build import build_definition
    from megasched.language.parallel_dims import Fp8, ParallelDims
    from megasched.layers.megatron.trials import Trials
    from megasched.model_adapters.default_schedule import schedule as default
    from megasched.model_adapters.registry import roles_of
    from megasched.plan.make import make_plan
    from megasched.trainer.scheduled_model import ScheduledModel
    from megasched.trainer.stages.stage import Stage
    from megasched.weights.random_init import RandomInit
    from tests import tiny

    world = torch.distributed.get_world_size()
    small = {"n_embd": 64} if family == "gpt2" else SIZES
    hf = tiny.config(family, **{**{k: v for k, v in small.items() if k in tiny.FAMILIES[family]}, **changes})
    definition = build_definition(hf)
    definition.config._attn_implementation = attention_interface.NAME
    layout = ParallelDims(
        tensor_model_parallel_size=world,
        sequence_parallel=sequence_parallel,
        fp8=None if fp8 is None else Fp8(**fp8),
        **(more_layout or {}),
    )
    sch = megasched.create_schedule(definition, layout, roles_of(definition))
    default(sch, layout)
    exec(calls, {"sch": sch})
    plan = make_plan(sch, causal_lm=True, trials=Trials, vocab_multiple=4 * world)
    structure = plan.structure
    assert structure is not None
    if fp8 is not None:
        more = {"fp8": "hybrid", "fp8_recipe": layout.fp8.fp8_recipe, **more}
    config = TransformerConfig(
        num_layers=structure.count,
        hidden_size=definition.config.hidden_size,
        ffn_hidden_size=getattr(definition.config, "intermediate_size", None),
        num_attention_heads=definition.config.num_attention_heads,
        tensor_model_parallel_size=world,
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        **more,
    )
    source = RandomInit(definition, 1234)
    import copy

    model = ScheduledModel(
        config,
        copy.deepcopy(definition),
        sch,
        plan,
        Stage(0, structure.count, True, True),
        source,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    return model.train(), definition, source


def in_buffers(model: Any, distributed_optimizer: bool) -> Any:
    """The model with its parameters and gradients in Megatron's buffers, as its trainer has them."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer
    )
    return DistributedDataParallel(model.config, settings, model)


def classes(model: Any) -> list[str]:
    return sorted({type(module).__name__ for module in model.modules()})


def whole_gradients(model: Any) -> dict[str, torch.Tensor]:
    """HF name -> gradient of the whole tensor; those that Megatron sums over TP at the end are summed here."""
    size = torch.distributed.get_world_size()
    found = {}
    for parameter, assembly in model.local_parameters().values():
        gradient = parameter.main_grad.clone()
        if getattr(parameter, "sequence_parallel", False):
            torch.distributed.all_reduce(gradient)
        for part, piece in zip(assembly.parts, assembly.split(gradient, size), strict=True):
            every: list[Any] = [None] * size
            torch.distributed.all_gather_object(every, piece)
            found[part.name] = part.unshard(every)
    return found


def gap(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-3))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
