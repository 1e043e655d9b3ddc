"""Slapo's models at TP2 x DP2, under DDP and under DeepSpeed's ZeRO-1, against one process: docs/slapo.md.

GPT-2 and OPT, the other two of its eight, are among the families of test_torch.py and test_zero.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_outputs import ImageClassifierOutput

import megasched
from megasched.definition.objectives import objective_of
from megasched.verify.ranks.pool import init_megatron
from tests.dialects.steps import (
    BATCH,
    LENGTH,
    STEPS,
    Batch,
    Steps,
    adamw,
    batches,
    beyond,
    by_hand,
    causal,
    engine_step_of,
    gaps,
    gathered,
    steps_of,
)
from tests.dialects.test_torch import ddp
from tests.dialects.test_zero import whole_of, zero_config
from tests.lowering.images import bottlenecks, pictures, wide_resnet
from tests.lowering.models import tiny_model
from tests.lowering.parity import distance
from tests.lowering.test_objectives import model_of

MODELS = ["bert", "t5"]
MODELS += [pytest.param(name, marks=pytest.mark.slow) for name in ("roberta", "albert", "gpt_neo")]
HIDDEN_TOKEN, HIDDEN = 3, 4


def masked() -> list[Batch]:
    """As many hidden tokens in each sequence, so that the mean over replicas is that of the batch."""
    generator, found = torch.Generator().manual_seed(2), []
    for ids in batches():
        places = torch.rand(ids.shape, generator=generator).topk(HIDDEN).indices
        hidden = torch.zeros(ids.shape, dtype=torch.bool).scatter(1, places, value=True)
        labels = ids.masked_fill(~hidden, -100)
        found.append({"input_ids": ids.masked_fill(hidden, HIDDEN_TOKEN), "labels": labels})
    return found


def translated() -> list[Batch]:
    """Labels of another length than the inputs."""
    return [{"input_ids": ids, "labels": ids.flip(1)[:, : LENGTH - 4].contiguous()} for ids in batches()]


DATA = {"masked_lm": masked, "causal_lm": causal, "seq2seq_lm": translated}


def by_ddp(model: Any) -> Steps:
    from megatron.core import parallel_state

    name = objective_of(model).name
    built = megasched.build(megasched.create_schedule(model, name="auto"))
    return by_hand(built, ddp(built, parallel_state.get_data_parallel_group()), DATA[name]())


def by_zero(model: Any) -> Steps:
    name = objective_of(model).name
    sch = megasched.create_schedule(model, name="auto")
    engine, _ = megasched.build(sch, target="deepspeed", config=zero_config(1), optimizer=adamw)
    losses, norms = [], []
    for batch in DATA[name]():
        losses.append(engine_step_of(engine, batch))
        norms.append(float(engine.get_global_grad_norm()))
    weights = gathered(engine.module, whole_of(1))
    engine.destroy()
    return Steps(losses, norms, weights)


def _against_one_process(name: str) -> dict[str, dict[str, float]]:
    init_megatron(tp=2)
    wanted = steps_of(model_of(name), DATA[objective_of(model_of(name)).name]())
    return {train.__name__: gaps(train(model_of(name)), wanted) for train in (by_ddp, by_zero)}


@pytest.mark.parametrize("name", MODELS)
def test_five_steps_are_those_of_one_process(deepspeed_ranks: Any, name: str) -> None:
    for found in deepspeed_ranks.run(4, _against_one_process, name):
        assert {n: off for n, off in found.items() if beyond(off)} == {}


def _deferred() -> dict[str, float]:
    """Distances of weights that DeepSpeed's third stage partitions from those that are built without it."""
    init_megatron(tp=2)
    torch.manual_seed(1)
    built = []
    for target in ({}, {"target": "deepspeed", "config": zero_config(3), "optimizer": adamw}):
        with megasched.init_empty_weights():
            model = tiny_model("llama")
        sch = megasched.create_schedule(model, name="auto")
        built.append(megasched.build(sch, **target, init_weights=model._init_weights))
    plain, (engine, _) = built
    wanted, found = gathered(plain, torch.Tensor.detach), gathered(engine.module, whole_of(3))
    engine.destroy()
    return {name: distance(found[name], wanted[name]) for name in wanted}


def test_deferred_weights_are_filled_before_they_are_partitioned(deepspeed_ranks: Any) -> None:
    for found in deepspeed_ranks.run(2, _deferred):
        assert found
        assert not any(found.values())


class Classifier(nn.Module):
    """TorchVision's model with the loss of its labels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = wide_resnet()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> ImageClassifierOutput:
        """Takes images [b, 3, h, w] and labels [b]."""
        return ImageClassifierOutput(loss=F.cross_entropy(self.net(x), labels))


def labeled() -> list[Batch]:
    labels = torch.arange(2 * BATCH)
    return [{"x": pictures(64, torch.float64, step), "labels": (labels + step) % 10} for step in range(STEPS)]


def classifier() -> Classifier:
    """In float64: batch norms over so few values amplify what float32 rounds."""
    torch.manual_seed(0)
    return Classifier().double().train()


def _wide_resnet() -> dict[str, float]:
    init_megatron(tp=2)
    from megatron.core import parallel_state

    sch = megasched.create_schedule(classifier())
    bottlenecks(sch, "net.")
    sch.sync_batch_norm()
    built = megasched.build(sch, inputs=labeled()[0])
    found = by_hand(built, ddp(built, parallel_state.get_data_parallel_group()), labeled())
    return gaps(found, steps_of(classifier(), labeled()))


def test_five_steps_of_wide_resnet_are_those_of_one_process(ranks: Any) -> None:
    for found in ranks.run(4, _wide_resnet):
        assert beyond(found) == {}
