"""ZeRO 0 to 3 of upstream DeepSpeed over DP2, the model cut over TP2, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megasched
from megasched.verify.ranks.pool import init_megatron
from tests.dialects.steps import (
    BATCH,
    CLIP,
    Steps,
    adamw,
    batches,
    beyond,
    engine_step,
    gaps,
    gathered,
    mean_over_replicas,
    of_this_replica,
    one_process,
)
from tests.lowering.models import auto, tiny_model
from tests.parity.cases import spread

# Columns and rows, transposed ones, experts, a partial gradient; the others before a release.
FAMILIES = ("llama", "gpt2", "mixtral", "qwen3", "phi3", "opt", "gemma2", "gpt_neox")
LATER = FAMILIES[4:]
STAGES = ((0, 3), (1, 2))


def zero_config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": BATCH // 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": CLIP,
        "steps_per_print": 10**9,
        **more,
    }


def whole_of(stage: int) -> Any:
    """A function that takes what a rank has of a parameter under ZeRO, gathered over data parallelism."""

    def whole(parameter: torch.Tensor) -> torch.Tensor:
        import deepspeed

        with deepspeed.zero.GatheredParameters(parameter, enabled=stage == 3):
            return parameter.detach().clone()

    return whole


def trained(family: str, stage: int, level: str | None, **asked: bool) -> Steps:
    sch = megasched.create_schedule(tiny_model(family), **asked)
    auto(sch)
    if level is not None:
        sch.level(level)
    engine, *_ = megasched.initialize(sch, target="deepspeed", config=zero_config(stage), optimizer=adamw)
    losses, norms = [], []
    for ids in batches():
        losses.append(engine_step(engine, ids))
        norms.append(engine.get_global_grad_norm())
    weights = gathered(engine.module, whole_of(stage))
    engine.destroy()
    return Steps(losses, [float(norm) for norm in norms if norm is not None], weights)


def _against_one_process(family: str, stages: tuple[int, ...], level: str | None) -> dict[int, dict[str, float]]:
    init_megatron(tp=2)
    wanted = one_process(family)
    return {stage: gaps(trained(family, stage, level), wanted) for stage in stages}


@pytest.mark.parametrize(("family", "stages"), spread(FAMILIES, STAGES, twins=LATER))
def test_zero_at_tp2_and_dp2_is_one_process(deepspeed_ranks: Any, family: str, stages: tuple[int, ...]) -> None:
    for found in deepspeed_ranks.run(4, _against_one_process, family, stages, None):
        assert {stage: off for stage, off in found.items() if beyond(off)} == {}


def _on_parts_of_the_sequence() -> dict[str, dict[str, float]]:
    init_megatron(tp=2)
    return {
        family: gaps(
            trained(family, stage, None, sequence_parallel=True, parallel_output=cut), one_process(family)
        )
        for family, stage, cut in (("llama", 3, True), ("gpt2", 2, True), ("qwen3", 1, False))
    }


def test_layers_on_parts_of_the_sequence_are_one_process(deepspeed_ranks: Any) -> None:
    for found in deepspeed_ranks.run(4, _on_parts_of_the_sequence):
        assert {family: off for family, off in found.items() if beyond(off)} == {}


def _without_sums() -> dict[str, float]:
    """The control: what the sum of partial gradients over TP is for."""
    from megasched.layers import regions

    init_megatron(tp=2)
    wanted = one_process("qwen3")
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(regions._SumOverRanks, "__call__", lambda self, gradient: gradient)
        return gaps(trained("qwen3", 1, None), wanted)


def test_without_the_sums_of_partial_gradients_it_would_be_off(deepspeed_ranks: Any) -> None:
    assert all(found["weights"] > 1e-4 for found in deepspeed_ranks.run(4, _without_sums))


def _without_marks() -> dict[str, float]:
    """The control: DeepSpeed's norm counts once what is not marked as cut."""
    init_megatron(tp=2)
    wanted = one_process("llama")
    real = megasched.lowering.build.lower

    def lower(schedule: Any, model: Any, *given: Any) -> None:
        real(schedule, model, *given)
        for parameter in model.parameters():
            parameter.tensor_model_parallel = False

    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(megasched.lowering.build, "lower", lower)
        return gaps(trained("llama", 1, None), wanted)


def test_without_the_marks_of_cut_parameters_the_norm_would_be_off(deepspeed_ranks: Any) -> None:
    assert all(found["norms"] > 0.1 for found in deepspeed_ranks.run(4, _without_marks))


def _options() -> dict[str, dict[str, float]]:
    """Accumulation, recompute, small buckets, and an optimizer of the built model's parameters."""
    init_megatron(tp=2)
    wanted, found = one_process("llama"), {}
    more = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
    for stage in (1, 3):
        sch = megasched.create_schedule(tiny_model("llama"))
        auto(sch)
        sch["model.layers.*"].checkpoint()
        sch.level("leaf")
        model = megasched.build(sch)
        config = zero_config(stage, **more)
        config["zero_optimization"] |= {"reduce_bucket_size": 1000, "stage3_param_persistence_threshold": 0}
        engine, optimizer, _, scheduler = megasched.initialize(
            sch,
            target="deepspeed",
            config=config,
            optimizer=adamw(model.parameters()),
            lr_scheduler=lambda of: torch.optim.lr_scheduler.ConstantLR(of, factor=1.0),
        )
        losses, norms = [], []
        for ids in batches():
            total = torch.zeros(())
            for mine in of_this_replica(ids).split(1):
                loss = engine(input_ids=mine, labels=mine).loss
                engine.backward(loss)
                engine.step()
                total += loss.detach() / 2
            losses.append(mean_over_replicas(total))
            norms.append(float(engine.get_global_grad_norm()))
        assert scheduler.last_epoch == len(losses)
        assert optimizer is engine.optimizer
        found[f"ZeRO-{stage}"] = gaps(Steps(losses, norms, gathered(engine.module, whole_of(stage))), wanted)
        engine.destroy()
    return found


def test_accumulation_recompute_small_buckets_and_a_clients_optimizer(deepspeed_ranks: Any) -> None:
    for found in deepspeed_ranks.run(4, _options):
        assert {n: off for n, off in found.items() if beyond(off)} == {}
