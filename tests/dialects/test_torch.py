"""DDP and FSDP2 over DP2, the model cut over TP2, in a plain loop against one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import megasched
from megasched.verify.ranks.pool import init_megatron
from tests.dialects.steps import Steps, adamw, beyond, by_hand, causal, gaps, one_process
from tests.dialects.test_zero import FAMILIES
from tests.lowering.models import auto, tiny_model
from tests.parity.cases import case


def ddp(model: Any, group: Any) -> Any:
    return DistributedDataParallel(model, process_group=group)


def fsdp2(model: Any, group: Any, *, but_experts: bool = False) -> Any:
    """``but_experts`` leaves those that EP shares out to the model, as docs/library.md says."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    left = {p for p in model.parameters() if but_experts and not getattr(p, "allreduce", True)}
    for path in layers_of(model):
        fully_shard(model.get_submodule(path), mesh=mesh, ignored_params=left)
    return fully_shard(model, mesh=mesh, ignored_params=left)


def layers_of(model: Any) -> list[str]:
    """Paths of the layers, which stand in the one list of modules that is not of experts."""
    return [
        f"{path}.{index}"
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and "experts" not in path
        for index in range(len(module))
    ]


def trained(
    family: str, wrap: Any, level: str | None, *, with_context_parallel: bool = False, **asked: bool
) -> Steps:
    from megatron.core import parallel_state

    sch = megasched.create_schedule(tiny_model(family), **asked)
    auto(sch)
    if level is not None:
        sch.level(level)
    model = megasched.build(sch)
    group = parallel_state.get_data_parallel_group(with_context_parallel=with_context_parallel)
    return by_hand(model, wrap(model, group), causal())


def _against_one_process(family: str) -> dict[str, dict[str, float]]:
    init_megatron(tp=2)
    wanted = one_process(family)
    return {
        "DDP": gaps(trained(family, ddp, None), wanted),
        "FSDP2": gaps(trained(family, fsdp2, "leaf"), wanted),
    }


FAST = ("llama", "mixtral")  # GPT-2 and Qwen3 are on parts of the sequence below


@pytest.mark.parametrize("family", [case(family, fast=family in FAST) for family in FAMILIES])
def test_ddp_and_fsdp2_at_tp2_and_dp2_are_one_process(ranks: Any, family: str) -> None:
    for found in ranks.run(4, _against_one_process, family):
        assert {wrap: off for wrap, off in found.items() if beyond(off)} == {}


def _on_parts_of_the_sequence() -> dict[str, dict[str, float]]:
    init_megatron(tp=2)
    cases: dict[str, Any] = {
        "llama": (fsdp2, "leaf", False),
        "gpt2": (ddp, None, True),
        "qwen3": (fsdp2, "leaf", True),
        "mixtral": (ddp, None, False),
    }
    return {
        family: gaps(trained(family, *how, sequence_parallel=True, parallel_output=cut), one_process(family))
        for family, (*how, cut) in cases.items()
    }


def test_layers_on_parts_of_the_sequence_are_one_process(ranks: Any) -> None:
    for found in ranks.run(4, _on_parts_of_the_sequence):
        assert {family: off for family, off in found.items() if beyond(off)} == {}


def _on_parts_of_a_sequence_each() -> dict[str, dict[str, float]]:
    """Over the ranks with other sequences, and over all: those that share one have the same gradients."""
    init_megatron(cp=2)
    cases: dict[str, Any] = {
        "llama": (fsdp2, "leaf", True),
        "qwen3": (fsdp2, "leaf", False),
        "gpt2": (ddp, None, False),
        "opt": (ddp, None, True),
    }
    return {
        family: gaps(trained(family, *how, with_context_parallel=both), one_process(family))
        for family, (*how, both) in cases.items()
    }


def test_context_parallel_ranks_are_one_process(ranks: Any) -> None:
    for found in ranks.run(4, _on_parts_of_a_sequence_each):
        assert {family: off for family, off in found.items() if beyond(off)} == {}


def _float16_scales() -> list[tuple[float, bool]]:
    """The scale after each of two steps, and whether the ranks have the same norm; one finds inf in the first."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    init_megatron(tp=2)
    model = megasched.apply_schedule(tiny_model("llama"), "auto")
    optimizer, scaler, found = adamw(model.parameters()), ShardedGradScaler("cpu", init_scale=2.0), []
    norm = model.model.norm.weight
    for batch in causal()[:2]:
        scaler.scale(model(**batch).loss).backward()
        if not found and torch.distributed.get_rank() == 0:
            model.model.layers[0].mlp.up_proj.weight.grad[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        megasched.clip_grad_norm_(model, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        of_first = norm.detach().clone()
        torch.distributed.broadcast(of_first, 0)
        found.append((scaler.get_scale(), torch.equal(of_first, norm)))
    return found


def test_ranks_leave_out_a_step_of_float16_together(ranks: Any) -> None:
    assert ranks.run(2, _float16_scales) == [[(1.0, True), (1.0, True)]] * 2


def _experts_over_ep() -> tuple[dict[str, dict[str, float]], list[str]]:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1
    )
    wanted = one_process("mixtral")
    found = {
        "DDP": gaps(trained("mixtral", ddp, None), wanted),
        "FSDP2, SP": gaps(
            trained("mixtral", partial(fsdp2, but_experts=True), "leaf", sequence_parallel=True), wanted
        ),
    }
    words = []
    for wrap in (fsdp2, lambda model, group: ddp(torch.nn.Sequential(model), group)):
        model = megasched.build(megasched.create_schedule(tiny_model("mixtral"), name="auto"))
        wrapped = wrap(model, parallel_state.get_data_parallel_group())
        with pytest.raises(megasched.ConfigError) as raised:
            wrapped(causal()[0]["input_ids"])
        words.append(str(raised.value))
    return found, words


def test_experts_shared_out_over_ep_are_one_process(ranks: Any) -> None:
    """Of 4 experts a rank has 2, which another rank has, too."""
    for found, words in ranks.run(4, _experts_over_ep):
        assert {how: off for how, off in found.items() if beyond(off)} == {}
        for trainer, said in zip(("FSDP2", "DDP"), words, strict=True):
            assert f"{trainer} takes model.layers.0.mlp.experts.gate_up_proj for the same on all" in said
            assert "ignored_params={p for p in model.parameters() if not getattr(p, 'allreduce', True)}" in said


def _over_all_ranks(wrap: Any) -> str:
    """As HF's Trainer wraps a model: the loss is off, in silence, without the check."""
    init_megatron(tp=2)
    model = megasched.build(megasched.create_schedule(tiny_model("llama"), name="auto"))
    wrapped = wrap(model, torch.distributed.group.WORLD)
    batch = causal()[0]
    with pytest.raises(megasched.ConfigError) as raised:
        wrapped(**batch)
    return str(raised.value)


@pytest.mark.parametrize("wrap", [ddp, fsdp2])
def test_ranks_with_other_shards_are_no_replicas(ranks: Any, wrap: Any) -> None:
    for rank, said in enumerate(ranks.run(2, _over_all_ranks, wrap)):
        trainer = {"ddp": "DDP", "fsdp2": "FSDP2"}[wrap.__name__]
        assert f"{trainer} takes ranks [0, 1] for replicas" in said
        assert f"those with its shards are [{rank}]" in said
        assert "HF's Trainer and accelerate wrap over all ranks" in said
