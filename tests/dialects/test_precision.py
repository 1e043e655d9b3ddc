"""bf16 and offload to the CPU under DeepSpeed.

In bf16 the weights after five steps are as near to float32's as plain HF's are under DeepSpeed. What the optimizer
keeps is compared, in float32: the model's own weights are rounded, which is more than a step moves them. The
optimizer is SGD, as AdamW makes whole steps of gradients that are nothing but rounding.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import megasched
from megasched.dialects.deepspeed.engine import imported
from megasched.dialects.deepspeed.mpu import ModelParallelUnit
from megasched.verify.bfloat16 import TENSOR_PARALLEL
from megasched.verify.ranks.pool import init_megatron
from tests.dialects.deepspeed_ranks import DEEPSPEED
from tests.dialects.steps import (
    BATCH,
    Steps,
    adamw,
    batches,
    beyond,
    causal,
    engine_step,
    gaps,
    gathered,
    one_process,
    steps_of,
)
from tests.dialects.test_pipeline_module import pipeline_config, pipeline_step
from tests.dialects.test_pipelines import of_all_stages
from tests.dialects.test_zero import whole_of, zero_config
from tests.lowering.models import tiny_model

BF16 = {"bf16": {"enabled": True}}
type Weights = dict[str, torch.Tensor]


def sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.1)


def rounded_model(family: str) -> Any:
    """A float32 model whose weights bf16 has, too."""
    model = tiny_model(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def kept(parameter: torch.Tensor) -> torch.Tensor:
    """What the optimizer keeps of a parameter, float32, gathered over data parallelism."""
    import deepspeed

    return deepspeed.utils.safe_get_full_fp32_param(parameter)


def in_float32(family: str) -> Weights:
    return steps_of(rounded_model(family), causal(), make=sgd).weights


def plain(family: str, stage: int) -> Weights:
    """Plain HF under DeepSpeed, with a part of the batch on each rank."""
    init_megatron()
    config, model = zero_config(stage, **BF16), rounded_model(family)
    config["train_micro_batch_size_per_gpu"] = BATCH // torch.distributed.get_world_size()
    options = {"optimizer": sgd(model.parameters()), "mpu": ModelParallelUnit()}
    engine, *_ = imported().initialize(model=model, config=config, **options)
    for ids in batches():
        mine = ids.chunk(torch.distributed.get_world_size())[torch.distributed.get_rank()]
        engine.backward(engine(input_ids=mine, labels=mine).loss)
        engine.step()
    weights = {name: kept(parameter).clone() for name, parameter in engine.module.named_parameters()}
    engine.destroy()
    return weights


def scheduled(family: str, stage: int, dtype: torch.dtype) -> Weights:
    init_megatron(tp=2)
    sch = megasched.create_schedule(rounded_model(family).to(dtype), name="auto")
    engine, *_ = megasched.initialize(sch, target="deepspeed", config=zero_config(stage, **BF16), optimizer=sgd)
    for ids in batches():
        engine_step(engine, ids)
    weights = gathered(engine.module, kept)
    engine.destroy()
    return weights


def in_stages(family: str) -> Weights:
    init_megatron(tp=2, pp=2)
    sch = megasched.create_schedule(rounded_model(family), name="auto")
    engine, *_ = megasched.initialize(sch, target="deepspeed", config=pipeline_config(1, **BF16), optimizer=sgd)
    for ids in batches():
        pipeline_step(engine, ids)
    weights = of_all_stages(list(engine.module.forward_funcs), kept)
    engine.destroy()
    return weights


@cache
def references(ranks: Any, family: str, stage: int) -> tuple[Weights, Weights]:
    """Plain HF's weights, and those of float32."""
    return ranks.run(4, plain, family, stage)[0], in_float32(family)


def ratios(ranks: Any, family: str, stage: int, run: Any, *given: Any) -> dict[str, float]:
    """Distance from float32 over that of plain HF: of all weights together, and the largest of a single one."""
    (theirs, exact), found = references(ranks, family, stage), ranks.run(4, run, family, *given)[0]
    assert found.keys() == theirs.keys() == exact.keys()

    def off(weights: Weights, *names: str) -> float:
        return float(torch.cat([(weights[name] - exact[name]).flatten() for name in names or exact]).norm())

    single = max(off(found, name) / off(theirs, name) for name in exact)
    return {"together": off(found) / off(theirs), "single": single}


def assert_as_near(found: dict[str, float]) -> None:
    assert found["together"] <= TENSOR_PARALLEL.gradients
    assert found["single"] <= TENSOR_PARALLEL.single


@pytest.mark.parametrize(("stage", "dtype"), [(1, torch.bfloat16), (3, torch.float32)])
@pytest.mark.parametrize(
    "family", ["qwen3", *(pytest.param(f, marks=pytest.mark.slow) for f in ("llama", "gpt2"))]
)
def test_bf16_is_as_near_to_float32_as_plain_hf(
    deepspeed_ranks: Any, family: str, stage: int, dtype: torch.dtype
) -> None:
    assert_as_near(ratios(deepspeed_ranks, family, stage, scheduled, stage, dtype))


@pytest.mark.parametrize("family", ["gpt2", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_stages_in_bf16_are_as_near_to_float32_as_plain_hf(deepspeed_ranks: Any, family: str) -> None:
    assert_as_near(ratios(deepspeed_ranks, family, 1, in_stages))


def _without_sums(family: str) -> Weights:
    from megasched.layers import regions

    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(regions._SumOverRanks, "__call__", lambda self, gradient: gradient)
        return scheduled(family, 1, torch.bfloat16)


def test_without_the_sums_of_partial_gradients_bf16_would_be_further_off(deepspeed_ranks: Any) -> None:
    assert ratios(deepspeed_ranks, "qwen3", 1, _without_sums)["single"] > 10


def _offloaded(family: str, stage: int, extensions: str) -> dict[str, float]:
    """Optimizer, and in ZeRO-3 parameters, on the host.

    Args:
        extensions: a folder where DeepSpeed's own Adam is compiled; torch's is taken if it is empty.
    """
    init_megatron(tp=2)
    sch = megasched.create_schedule(tiny_model(family), name="auto")
    config = zero_config(stage, zero_force_ds_cpu_optimizer=bool(extensions))
    config["zero_optimization"] |= {"offload_optimizer": {"device": "cpu"}}
    if stage == 3:
        config["zero_optimization"] |= {"offload_param": {"device": "cpu"}}
    if extensions:
        same = {"lr": 1e-3, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-6}
        config["optimizer"] = {"type": "AdamW", "params": same}
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("TORCH_EXTENSIONS_DIR", extensions or os.devnull)
        changed.setenv(
            "PATH", os.pathsep.join([str(DEEPSPEED / "bin"), str(Path(sys.prefix) / "bin"), os.environ["PATH"]])
        )
        engine, *_ = megasched.initialize(
            sch, target="deepspeed", config=config, optimizer=None if extensions else adamw
        )
        steps = [(engine_step(engine, ids), float(engine.get_global_grad_norm())) for ids in batches()]
    assert type(engine.optimizer.optimizer).__name__ == ("DeepSpeedCPUAdam" if extensions else "AdamW")
    weights = gathered(engine.module, whole_of(stage))
    engine.destroy()
    losses, norms = map(list, zip(*steps, strict=True))
    return gaps(Steps(losses, norms, weights), one_process(family))


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_offload_with_torchs_optimizer(deepspeed_ranks: Any, stage: int) -> None:
    for found in deepspeed_ranks.run(4, _offloaded, "llama", stage, ""):
        assert beyond(found) == {}


@pytest.mark.slow  # it is compiled first
@pytest.mark.parametrize(("family", "stage"), [("llama", 1), ("gpt2", 2), ("qwen3", 3)])
def test_offload_with_deepspeeds_own_adam(
    deepspeed_ranks: Any, tmp_path_factory: Any, family: str, stage: int
) -> None:
    extensions = str(tmp_path_factory.getbasetemp() / "extensions")
    for found in deepspeed_ranks.run(4, _offloaded, family, stage, extensions, timeout=500):
        assert beyond(found) == {}
