"""Stages of scheduled models as the layers of DeepSpeed's PipelineModule, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megasched
from megasched.verify.ranks.pool import init_megatron
from tests.dialects.steps import (
    BATCH,
    CLIP,
    CROSSING,
    Steps,
    adamw,
    batches,
    beyond,
    gaps,
    model_of,
    of_this_replica,
    one_process,
    refusal,
    whole,
)
from tests.dialects.test_pipelines import of_all_stages
from tests.dialects.test_zero import zero_config
from tests.lowering.models import tiny_model

LAYOUTS = {"PP2": (2, 1, 2), "TP2 x PP2": (4, 2, 2), "PP2 x DP2": (4, 1, 2), "PP4": (4, 1, 4)}
FAMILIES = ["llama", "gpt2", "qwen3", "gpt_neox", "mixtral", "phi3"]
EACH_TIME = [("llama", "PP2 x DP2"), ("gpt2", "TP2 x PP2")]  # the others before a release; PP4 is below, too
CASES = [
    pytest.param(family, layout, marks=[] if (family, layout) in EACH_TIME else [pytest.mark.slow])
    for family in FAMILIES
    for layout in LAYOUTS
]


def pipeline_config(stage: int, **more: Any) -> dict[str, Any]:
    from megatron.core import parallel_state

    micro = BATCH // parallel_state.get_data_parallel_world_size()
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": micro}
    return {**zero_config(stage), **sizes, **more}


def pipeline_step(engine: Any, ids: torch.Tensor) -> float:
    """A step on this replica's part of a batch, sequence by sequence; its loss over all replicas."""
    return float(engine.train_batch(iter([(one, one) for one in of_this_replica(ids).split(1)])))


def trained(
    family: str, stage: int, clip: float = CLIP, asked: dict[str, bool] | None = None, **changes: Any
) -> Steps:
    sch = megasched.create_schedule(model_of(family, **changes), name="auto", **(asked or {}))
    config = pipeline_config(stage, gradient_clipping=clip)
    engine, *_ = megasched.initialize(sch, target="deepspeed", config=config, optimizer=adamw)
    losses, norms = [], []
    for ids in batches():
        losses.append(pipeline_step(engine, ids))
        norms.append(engine.get_global_grad_norm())
    weights = of_all_stages(list(engine.module.forward_funcs), whole)
    engine.destroy()
    return Steps(losses, [float(norm) for norm in norms if norm is not None], weights)


def _against_one_process(family: str, tp: int, pp: int, *, clipped: bool = True) -> dict[str, float]:
    init_megatron(tp=tp, pp=pp)
    layers = {} if family in CROSSING else {"n_layer" if family == "gpt2" else "num_hidden_layers": max(2, pp)}
    if clipped:
        return gaps(trained(family, 1, **layers), one_process(family, **layers))
    return gaps(trained(family, 0, clip=0.0, **layers), one_process(family, clip=float("inf"), **layers))


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_stages_under_deepspeed_are_one_process(deepspeed_ranks: Any, family: str, layout: str) -> None:
    ranks, tp, pp = LAYOUTS[layout]
    for found in deepspeed_ranks.run(ranks, _against_one_process, family, tp, pp):
        assert beyond(found) == {}


@pytest.mark.parametrize("family", CROSSING)
def test_what_else_crosses_a_cut_comes_with_the_hidden_state(deepspeed_ranks: Any, family: str) -> None:
    for found in deepspeed_ranks.run(2, _against_one_process, family, 1, 2):
        assert beyond(found) == {}


def test_stage_0_without_clipping(deepspeed_ranks: Any) -> None:
    for found in deepspeed_ranks.run(4, _against_one_process, "gpt2", 1, 4, clipped=False):
        assert beyond(found) == {}


def _on_parts_of_the_sequence() -> dict[str, float]:
    init_megatron(tp=2, pp=2)
    return gaps(
        trained("llama", 1, asked={"sequence_parallel": True, "parallel_output": True}), one_process("llama")
    )


def test_stages_on_parts_of_the_sequence_are_one_process(deepspeed_ranks: Any) -> None:
    """DeepSpeed would send a part by each TP rank of a hidden state that all of them have."""
    for found in deepspeed_ranks.run(4, _on_parts_of_the_sequence):
        assert beyond(found) == {}


def _without_marks() -> dict[str, float]:
    """The control: DeepSpeed's norm counts a tied parameter on each of its stages that is not marked."""
    from megasched.dialects.stages import StageModule

    init_megatron(pp=2)
    wanted = one_process("gpt2")
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(StageModule, "copies", frozenset())
        return gaps(trained("gpt2", 1), wanted)


def test_without_the_marks_of_tied_parameters_the_norm_would_be_off(deepspeed_ranks: Any) -> None:
    assert all(found["norms"] > 1e-3 for found in deepspeed_ranks.run(2, _without_marks))


def _resumed(folder: str) -> tuple[list[float], list[float]]:
    """Losses of two steps after a checkpoint: of the run that saved it, and of one that began with zeros."""
    init_megatron(tp=2, pp=2)

    def engine_of(model: Any) -> Any:
        sch = megasched.create_schedule(model, name="auto")
        return megasched.initialize(sch, target="deepspeed", config=pipeline_config(1), optimizer=adamw)[0]

    def steps(engine: Any, chosen: Any) -> list[float]:
        return [pipeline_step(engine, ids) for ids in chosen]

    engine = engine_of(tiny_model("gpt2"))
    steps(engine, batches()[:3])
    engine.save_checkpoint(folder, tag="three")
    on = steps(engine, batches()[3:])
    engine.destroy()
    model = tiny_model("gpt2")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    engine = engine_of(model)
    engine.load_checkpoint(folder, tag="three")
    again = steps(engine, batches()[3:])
    engine.destroy()
    return on, again


def test_a_pipelines_checkpoint_goes_on(deepspeed_ranks: Any, tmp_path: Any) -> None:
    for on, again in deepspeed_ranks.run(4, _resumed, str(tmp_path)):
        assert on == again


def _own_loss_and_data() -> list[float]:
    """A loss of the user's, and batches that DeepSpeed loads."""
    init_megatron(pp=2)

    def twice(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return 2 * torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    sch = megasched.create_schedule(tiny_model("llama"), name="auto")
    rows = [(row, row) for row in torch.cat(batches())]
    options: dict[str, Any] = {"optimizer": adamw, "loss_fn": twice, "training_data": rows}
    config = pipeline_config(1, gradient_clipping=0.0)
    engine, _, loader, _ = megasched.initialize(sch, target="deepspeed", config=config, **options)
    assert loader is not None
    losses = [float(engine.train_batch())]
    engine.destroy()
    return losses


def test_a_loss_of_ones_own_and_deepspeeds_loader(deepspeed_ranks: Any) -> None:
    wanted = 2 * one_process("llama").losses[0]
    for losses in deepspeed_ranks.run(2, _own_loss_and_data):
        assert losses == pytest.approx([wanted], rel=1e-6)


def _refusals() -> list[str]:
    init_megatron(pp=2)
    words = []
    for family, more, options in (
        ("llama", {"zero_optimization": {"stage": 2}}, {}),
        ("llama", {"zero_optimization": {"stage": 0}}, {}),
        ("llama", {"pipeline": {"activation_checkpoint_interval": 1}}, {}),
        ("llama", {"checkpoint": {"load_universal": True}}, {}),
        ("llama", {}, {"inputs": {}}),
        ("llama", {}, {"init_weights": torch.nn.init.zeros_}),
    ):
        sch = megasched.create_schedule(tiny_model(family), name="auto")
        words.append(refusal(sch, pipeline_config(1, **more), **options))
        assert not sch.built
    return words


def test_what_a_pipeline_does_not_have_is_said(deepspeed_ranks: Any) -> None:
    for zero, clipped, interval, universal, inputs, weights in deepspeed_ranks.run(2, _refusals):
        assert "zero_optimization.stage = 2: DeepSpeed's pipelines take 0 or 1" in zero
        assert "zero_optimization.stage = 0 with gradient_clipping" in clipped
        assert "take stage 1" in clipped
        assert "pipeline.activation_checkpoint_interval" in interval
        assert ".checkpoint() instead" in interval
        assert "checkpoint.load_universal" in universal
        assert "inputs=" in inputs
        assert "init_weights=: megasched.materialize fills the deferred weights" in weights


def _other_order() -> str:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, order="pp-tp-cp-ep-dp")
    sch = megasched.create_schedule(tiny_model("llama"), name="auto")
    return refusal(sch, pipeline_config(1))


def test_groups_of_another_order_are_refused(deepspeed_ranks: Any) -> None:
    said = deepspeed_ranks.run(4, _other_order)
    assert any("leave out initialize_model_parallel(order=)" in words for words in said)


def _loss_without_stages() -> str:
    init_megatron()
    sch = megasched.create_schedule(tiny_model("llama"), name="auto")
    return refusal(sch, pipeline_config(1), loss_fn=torch.nn.functional.cross_entropy)


def test_a_loss_is_for_stages(deepspeed_ranks: Any) -> None:
    (said,) = deepspeed_ranks.run(1, _loss_without_stages)
    assert "loss_fn=: without pipeline stages the model's own forward returns the loss" in said
