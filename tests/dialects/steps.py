"""Five steps of a model in one process, and what a trainer over ranks is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import megasched
from megasched.definition.small_models.small_models import small_copy
from megasched.lowering.build import plan_of
from tests.lowering.models import VOCABULARY, randomize, tiny_model

STEPS, BATCH, LENGTH = 5, 4, 12
CLIP = 0.5
BOUNDS = {"losses": 1e-6, "norms": 1e-6, "weights": 1e-5}
# Families whose layers read more of earlier ones than the hidden state: keys, values and projected embeddings; the
# indices that an indexer chose.
CROSSING = ["gemma4_text", "glm_moe_dsa"]


Batch = dict[str, torch.Tensor]


@dataclass
class Steps:
    """Losses and gradient norms of each step, and the weights after the last."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def model_of(family: str, **changes: Any) -> Any:
    if family not in CROSSING:
        return tiny_model(family, **changes)
    from transformers import AutoConfig, AutoModelForCausalLM

    config = small_copy(AutoConfig.for_model(family), layers=4)
    config.vocab_size = VOCABULARY
    model = randomize(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("indexer" not in name)  # they get no gradient, and ZeRO would let them decay
    return model.train()


def adamw(parameters: Any) -> torch.optim.AdamW:
    """At torch's epsilon of 1e-8 float32 itself is 2e-5 and more off float64 after five steps."""
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-6)


def batches() -> list[torch.Tensor]:
    """Token ids [b, s] of each step."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(4, VOCABULARY, (BATCH, LENGTH), generator=generator) for _ in range(STEPS)]


def causal() -> list[Batch]:
    """What a causal language model is called with in each step."""
    return [{"input_ids": ids, "labels": ids} for ids in batches()]


def one_process(family: str, clip: float = CLIP, **changes: Any) -> Steps:
    return steps_of(model_of(family, **changes), causal(), clip)


def steps_of(model: Any, data: list[Batch], clip: float = CLIP, make: Any = adamw) -> Steps:
    """The unscheduled model with torch's AdamW, or what ``make`` makes, and clipping."""
    optimizer = make(model.parameters())
    losses, norms = [], []
    for batch in data:
        loss = model(**batch).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return Steps(losses, norms, {name: parameter.detach() for name, parameter in model.named_parameters()})


def mean_over_replicas(loss: torch.Tensor) -> float:
    """The loss of the whole batch, of which each data-parallel rank has a part."""
    from megatron.core import parallel_state

    group, mean = parallel_state.get_data_parallel_group(), loss.detach().clone()
    torch.distributed.all_reduce(mean, group=group)
    return float(mean) / group.size()


def of_this_replica(ids: torch.Tensor) -> torch.Tensor:
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group()
    return ids.chunk(group.size())[group.rank()]


def engine_step(engine: Any, ids: torch.Tensor) -> float:
    """A step of DeepSpeed's engine on a batch of a causal language model; its loss over all replicas."""
    return engine_step_of(engine, {"input_ids": ids, "labels": ids})


def engine_step_of(engine: Any, batch: Batch) -> float:
    loss = engine(**shared(batch)).loss
    engine.backward(loss)
    engine.step()
    return mean_over_replicas(loss)


def refusal(sch: Any, config: Any, **options: Any) -> str:
    """What is said where ``megasched.initialize`` refuses a schedule, a config or an option."""
    with pytest.raises(megasched.ConfigError) as raised:
        megasched.initialize(sch, target="deepspeed", config=config, **{"optimizer": adamw, **options})
    return str(raised.value)


def shared(batch: Batch) -> Batch:
    """This replica's part of a batch."""
    return {name: of_this_replica(tensor) for name, tensor in batch.items()}


def by_hand(model: Any, wrapped: Any, data: list[Batch]) -> Steps:
    """A plain loop over a built model, which DDP or FSDP2 has wrapped."""
    optimizer = adamw(model.parameters())
    losses, norms = [], []
    for batch in data:
        loss = wrapped(**shared(batch)).loss
        loss.backward()
        norms.append(float(megasched.clip_grad_norm_(model, CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_replicas(loss))
    return Steps(losses, norms, gathered(model, whole))


def gathered(model: Any, whole: Any) -> dict[str, torch.Tensor]:
    """Name -> the whole HF tensor; ``whole`` takes a parameter over data parallelism."""
    placements = plan_of(model).placements
    return {name: unsharded(placements[name], whole(parameter)) for name, parameter in model.named_parameters()}


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter gathered over data parallelism, where FSDP2 has sharded it."""
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach()


def unsharded(placement: Any, local: torch.Tensor) -> torch.Tensor:
    """The whole HF tensor of what each TP rank has of it, or of an expert each EP rank."""
    from megatron.core import parallel_state

    of_experts = placement.group == "ep"
    group = (
        parallel_state.get_expert_model_parallel_group()
        if of_experts
        else parallel_state.get_tensor_model_parallel_group()
    )
    every: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(every, local.detach().clone(), group=group)
    return placement.unshard(every)


def beyond(found: dict[str, float]) -> dict[str, float]:
    """Those of ``gaps`` that are beyond their bounds."""
    return {name: off for name, off in found.items() if off > BOUNDS[name]}


def gaps(found: Steps, wanted: Steps) -> dict[str, float]:
    """Largest relative distance of losses, of norms where there are any, and of each weight's tensor."""

    def off(a: list[float], b: list[float]) -> float:
        return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))

    assert found.weights.keys() == wanted.weights.keys()
    weights = {
        name: float((found.weights[name] - value).abs().max() / value.abs().max())
        for name, value in wanted.weights.items()
    }
    return {
        "losses": off(found.losses, wanted.losses),
        "norms": off(found.norms, wanted.norms) if found.norms else 0.0,
        "weights": max(weights.values()),
    }
