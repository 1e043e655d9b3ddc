"""Stages of scheduled models under torch.distributed.pipelining, with TP, FSDP2 and ties, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megasched
from megasched.lowering.build import plan_of
from megasched.verify.ranks.pool import init_megatron
from tests.dialects.steps import (
    CLIP,
    Steps,
    adamw,
    batches,
    beyond,
    gaps,
    mean_over_replicas,
    model_of,
    of_this_replica,
    one_process,
    unsharded,
    whole,
)
from tests.dialects.test_torch import layers_of
from tests.dialects.test_zero import FAMILIES, LATER
from tests.lowering.models import tiny_model
from tests.parity.cases import slow, spread


def sharded(stage: Any, group: Any) -> Any:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    for path in layers_of(stage):
        layer = stage.get_submodule(path)
        if next(layer.parameters(), None) is not None:
            fully_shard(layer, mesh=mesh)
    return fully_shard(stage, mesh=mesh)


def of_all_stages(stages: list[Any], whole: Any) -> dict[str, torch.Tensor]:
    """Name -> the whole HF tensor, of all stages; copies of one are equal. ``whole`` is as for ``gathered``."""
    from megatron.core import parallel_state

    pp = parallel_state.get_pipeline_model_parallel_group()
    mine = {}
    for stage in stages:
        plan = plan_of(stage)
        for name, parameter in stage.definition.named_parameters():
            canonical = plan.canonical[name]
            mine[canonical] = unsharded(plan.placements[canonical], whole(parameter))
    parts: list[Any] = [None] * pp.size()
    torch.distributed.all_gather_object(parts, mine, group=pp)
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, value in part.items():
            assert torch.allclose(found.setdefault(name, value), value, atol=1e-7), name
    return found


def trained(family: str, interleaved: bool, asked: dict[str, bool] | None = None, **changes: Any) -> Steps:
    from megatron.core import parallel_state
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

    pp, dp = (
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_data_parallel_group(),
    )
    rank, size = pp.rank(), pp.size()
    count = 2 * size if interleaved else size
    stages, sent = [], []
    for index in range(rank, count, size):
        model = model_of(family, **changes)
        sch = megasched.create_schedule(model, name="auto", **(asked or {}))
        sch.level("leaf")
        stage = megasched.build_stage(sch, index, count)
        stages.append(sharded(stage, dp) if dp.size() > 1 else stage)
        sent.append(PipelineStage(stages[-1], index, count, torch.device("cpu"), group=pp))
    micro = 4 // dp.size()
    loss_fn = stages[-1].loss
    run: Any = (
        ScheduleInterleaved1F1B(sent, micro, loss_fn=loss_fn)
        if interleaved
        else Schedule1F1B(sent[0], micro, loss_fn=loss_fn)
    )
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    optimizer = adamw(parameters)
    losses, norms = [], []
    for ids in batches():
        mine, of_micro = of_this_replica(ids), []
        given = (mine,) if rank == 0 else ()
        run.step(*given, **({"target": mine, "losses": of_micro} if rank == size - 1 else {}))
        for stage in stages:
            stage.sum_shared_gradients()
        norms.append(float(megasched.clip_grad_norm_(stages, CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(of_micro).mean().detach() if of_micro else torch.zeros(())
        torch.distributed.broadcast(loss, torch.distributed.get_global_rank(pp, size - 1), group=pp)
        losses.append(mean_over_replicas(loss))
    return Steps(losses, norms, of_all_stages(stages, whole))


def _against_one_process(family: str, tp: int, **options: Any) -> dict[str, float]:
    init_megatron(tp=tp, pp=2)
    return gaps(trained(family, interleaved=False, **options), one_process(family))


def _interleaved(family: str) -> dict[str, float]:
    init_megatron(pp=2)
    layers = {"n_layer" if family == "gpt2" else "num_hidden_layers": 4}
    return gaps(trained(family, interleaved=True, **layers), one_process(family, **layers))


def _crossing(family: str) -> dict[str, float]:
    init_megatron(pp=2)
    return gaps(trained(family, interleaved=False), one_process(family))


def test_what_else_crosses_a_cut_comes_with_the_hidden_state(ranks: Any) -> None:
    for found in ranks.run(2, _crossing, "gemma4_text"):
        assert beyond(found) == {}


def test_stages_on_parts_of_the_sequence_are_one_process(ranks: Any) -> None:
    asked = {"sequence_parallel": True, "parallel_output": True}
    for found in ranks.run(4, _against_one_process, "gemma4_text", 2, asked=asked):
        assert beyond(found) == {}


def _on_parts_of_a_sequence_each(family: str) -> dict[str, float]:
    init_megatron(pp=2, cp=2)
    return gaps(trained(family, interleaved=False), one_process(family))


@pytest.mark.parametrize("family", ["gpt2", slow("qwen3"), slow("gemma2")])
def test_stages_of_context_parallel_ranks_are_one_process(ranks: Any, family: str) -> None:
    for found in ranks.run(4, _on_parts_of_a_sequence_each, family):
        assert beyond(found) == {}


def _filled(folder: str) -> list[str]:
    """Names of a stage's parameters that are not those of the folder; the head is tied to an earlier stage."""
    from megasched.definition.build import build_definition, load_config

    init_megatron(tp=2, pp=2)
    source = megasched.HFFolder(folder, build_definition(load_config(folder)))
    deferred, real = (
        megasched.build_stage(megasched.create_schedule(model, name="auto"))
        for model in (build_definition(load_config(folder)), tiny_model("gpt2"))
    )
    megasched.materialize(deferred, source)
    there = dict(real.named_parameters())
    assert dict(deferred.named_parameters()).keys() == there.keys()
    return [name for name, value in deferred.named_parameters() if not torch.equal(there[name], value)]


def test_deferred_weights_of_a_stage_are_filled(ranks: Any, tmp_path: Any) -> None:
    tiny_model("gpt2").save_pretrained(tmp_path)
    assert ranks.run(4, _filled, str(tmp_path)) == [[]] * 4


def _refused() -> list[str]:
    init_megatron(pp=2)
    words = []
    sch = megasched.create_schedule(tiny_model("mixtral", output_router_logits=True), name="auto")
    with pytest.raises(megasched.ScheduleError) as raised:
        megasched.build_stage(sch)
    words.append(str(raised.value))
    stage = megasched.build_stage(megasched.create_schedule(tiny_model("llama"), name="auto"), 0, 2)
    with pytest.raises(ValueError, match="first stage") as given:
        stage(batches()[0], torch.ones(1))
    rank = torch.distributed.get_rank()
    sch = megasched.create_schedule(tiny_model("qwen3", num_hidden_layers=4), name="auto")
    with pytest.raises(megasched.ScheduleError) as elsewhere:
        megasched.build_stage(sch, 0 if rank else 3, 4)
    return [*words, str(given.value), str(elsewhere.value)]


def test_what_a_stage_would_drop_is_refused(ranks: Any) -> None:
    for rank, (router, mask, tie) in enumerate(ranks.run(2, _refused)):
        assert "its loss takes more than the logits" in router
        assert "config.output_router_logits = False" in router
        assert "takes token ids [b, s] alone, and was given 2 tensors" in mask
        assert "stages 0 and 3 hold it, and its gradients are summed over" in tie
        assert f"here stage {0 if rank else 3} is on rank {rank} of 2" in tie


def _frozen_ties() -> dict[str, float]:
    from megatron.core import parallel_state
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    init_megatron(pp=2)
    model, whole_model = model_of("qwen3"), model_of("qwen3")
    for each in (model, whole_model):
        each.get_input_embeddings().weight.requires_grad_(False)
    ids, group = batches()[0], parallel_state.get_pipeline_model_parallel_group()
    whole_model(input_ids=ids, labels=ids).loss.backward()
    wanted = dict(whole_model.named_parameters())
    stage = megasched.build_stage(megasched.create_schedule(model, name="auto"))
    sent = PipelineStage(stage, group.rank(), 2, torch.device("cpu"), group=group)
    run = ScheduleGPipe(sent, n_microbatches=2, loss_fn=stage.loss)
    run.step(*([] if group.rank() else [ids]), **({"target": ids} if group.rank() else {}))
    stage.sum_shared_gradients()
    found = dict(stage.definition.named_parameters())
    return {
        name: float((wanted[name].grad - one.grad).abs().max() / wanted[name].grad.abs().max())
        for name, one in found.items()
        if one.requires_grad
    }


def test_frozen_ties_have_no_gradients_to_sum(ranks: Any) -> None:
    """As with adapters, which freeze all weights around them."""
    for found in ranks.run(2, _frozen_ties):
        assert found
        assert max(found.values()) < 1e-5


@pytest.mark.parametrize("family", ["qwen3", slow("gpt2")])  # both with tied embeddings
def test_interleaved_stages_are_one_process(ranks: Any, family: str) -> None:
    for found in ranks.run(2, _interleaved, family):
        assert beyond(found) == {}


# TP2 x PP2, and PP2 x DP2 with FSDP2.
@pytest.mark.parametrize(("family", "tp"), spread(FAMILIES, (2, 1), twins=LATER))
def test_stages_are_one_process(ranks: Any, family: str, tp: int) -> None:
    for found in ranks.run(4, _against_one_process, family, tp):
        assert beyond(found) == {}
