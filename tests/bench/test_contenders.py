"""The comparison of contenders, but for their processes; and what a plain HF model is for Megatron's trainer."""

import itertools
import json
from argparse import ArgumentParser
from typing import Any

import contender_worker
import contenders
import native
import pytest
import torch
import trainer_side
from megatron.core.package_info import MAJOR, MINOR
from megatron.training.arguments import add_megatron_arguments

from megasched.errors import Problem, ScheduleError
from megasched.language.schedule_file import find_schedule
from megasched.trainer.flags.arguments import add_megasched_arguments


def test_turns_begin_with_each_contender_and_run_both_ways() -> None:
    names = ["a", "b", "c"]
    orders = [contenders.turn_order(names, number) for number in range(6)]
    assert orders[:4] == [["a", "b", "c"], ["c", "b", "a"], ["b", "c", "a"], ["a", "c", "b"]]
    assert all(sorted(order) == names for order in orders)
    assert {order[0] for order in orders} == set(names)


def test_every_level_is_a_schedule() -> None:
    for name in contenders.LEVELS:
        assert callable(find_schedule(contenders.LEVELS[name]))


class FakeWorker:
    """Answers as a worker does: ``broken`` can't be built, the others take their own time."""

    alive = ()
    together = ()

    def __init__(self, name: str, *given: Any) -> None:
        self.name = name
        FakeWorker.alive = (*FakeWorker.alive, name)
        FakeWorker.together = (*FakeWorker.together, FakeWorker.alive)
        self.channel, self.begun = self, False

    def send(self, order: tuple[str]) -> None:
        assert order == ("begin",)
        self.begun = True

    def receive(self) -> Any:
        if self.name == "broken":
            return "failed", "no compiler"
        return ("ready" if self.begun else "built"), None

    def ask(self, order: str, *values: Any) -> dict[str, Any]:
        if order == "emulation":
            return {"calls": 3, "seconds": 0.1}
        if order == "kernels":
            return {"kernels": [self.name]}
        return {"seconds": [2.0 if self.name == "native" else 1.0] * values[0], "peak_bytes": 7}

    def close(self) -> None:
        FakeWorker.alive = tuple(name for name in FakeWorker.alive if name != self.name)


def test_what_cannot_be_built_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "Worker", FakeWorker)
    chosen = dict.fromkeys(("native", "broken", "ours"), contenders.Contender("builder"))
    setting = trainer_side.Setting("tiny", rehearse=True)
    data = contenders.compare(chosen, setting, rounds=3, steps=2)
    assert data["left_out"] == {"broken": "no compiler"}
    assert data["seconds"].keys() == {"native", "ours"} == data["emulation"].keys()
    assert data["rounds"]["ours"] == [1.0] * 3
    assert data["speed_relative_to"]["native"]["ours"]["median"] == 2.0
    assert data["peak_bytes"] == {"native": 7, "ours": 7}
    assert data["tokens_per_second"]["ours"] == setting.tokens == 16
    json.dumps(data)
    assert "broken" in contenders.table(data)


def test_of_pairs_no_more_than_two_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "Worker", FakeWorker)
    monkeypatch.setattr(FakeWorker, "together", ())
    chosen = dict.fromkeys(("ours", "native", "broken", "hf_eager"), contenders.Contender("builder"))
    told = []
    data = contenders.compare(
        chosen,
        trainer_side.Setting("tiny"),
        rounds=3,
        steps=2,
        stays="native",
        on_group=lambda data: told.append(list(data["tokens_per_second"])),
    )
    # A pair is told when it is done, so that it can be written before the next one comes.
    assert told == [["native", "ours"], ["native", "ours"], ["native", "ours", "hf_eager"]]
    assert FakeWorker.together == (("native",), ("native", "ours"), ("native", "broken"), ("native", "hf_eager"))
    assert FakeWorker.alive == ()
    assert data["left_out"] == {"broken": "no compiler"}
    assert {name: one["median"] for name, one in data["speed_relative_to"]["native"].items()} == {
        "ours": 2.0,
        "hf_eager": 2.0,
    }
    assert data["peak_bytes"] == {"native": 7, "ours": 7, "hf_eager": 7}
    assert contenders.table(data).count("2.000") == 2


def test_some_at_a_time_come_to_the_one_that_stays() -> None:
    names = ["a", "native", "b", "c"]
    assert contenders.groups(names, None) == [names]
    assert contenders.groups(names, "native") == [["native", "a"], ["native", "b"], ["native", "c"]]
    assert contenders.groups(names, "native", 2) == [["native", "a", "b"], ["native", "c"]]


def test_kernels_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "Worker", FakeWorker)
    asked = []
    monkeypatch.setattr(FakeWorker, "ask", _noting(FakeWorker.ask, asked))
    chosen = dict.fromkeys(("native", "ours", "theirs"), contenders.Contender("builder"))
    setting = trainer_side.Setting("tiny")
    data = contenders.compare(chosen, setting, rounds=1, steps=1, stays="native", kernels=True)
    assert data["kernels"] == {name: {"kernels": [name]} for name in chosen}
    assert sorted(name for name, order in asked if order == "kernels") == sorted(chosen)
    assert "kernels:" not in contenders.table(data)


def test_kernels_that_were_not_seen_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "Worker", FakeWorker)
    chosen = dict.fromkeys(("native", "ours"), contenders.Contender("builder"))
    data = contenders.compare(chosen, trainer_side.Setting("tiny"), rounds=1, steps=1, kernels=True)
    data["kernels"] = {"native": {"kernels": []}, "ours": {"why": "no profiler"}}
    told = contenders.table(data)
    assert f"{'native':16} kernels: torch has seen none" in told
    assert f"{'ours':16} kernels: no profiler" in told


def _noting(ask: Any, asked: list[Any]) -> Any:
    def noted(self: FakeWorker, order: str, *values: Any) -> Any:
        asked.append((self.name, order))
        return ask(self, order, *values)

    return noted


def test_a_step_on_a_gpu_needs_no_iterator_of_megatrons_own() -> None:
    """Megatron asserts one in the first step, unless it is told not to look for faults."""
    given = trainer_side.flags(trainer_side.Setting("tiny"))
    args = add_megasched_arguments(add_megatron_arguments(ArgumentParser(allow_abbrev=False))).parse_args(given)
    assert args.rerun_mode == "disabled"


def test_the_reason_of_an_error_is_no_heading() -> None:
    error = ScheduleError([Problem("no such level", "model.layers"), Problem("no such module", "model.x")])
    assert contender_worker.first_reason(error) == "no such level"
    assert contender_worker.first_reason(ValueError("one line")) == "one line"


def test_both_sides_get_the_same_flags() -> None:
    setting = trainer_side.Setting("tiny", bf16=True, rehearse=True, extra=("--fp8-format", "hybrid"))
    first, second = (trainer_side.flags(setting, schedule) for schedule in ("auto", "levels.py:block"))
    differing = {a for a, b in zip(first, second, strict=True) if a != b and "bench" not in a}
    assert differing == {"auto"}
    assert "--bf16" in first
    assert "--fp8-format" not in first  # a rehearsal leaves it out


def test_hf_chunk_gives_hf_loss_per_token(ranks: Any) -> None:
    ((ours, expected, table),) = ranks.run(1, _hf_chunk)
    assert ours == pytest.approx(expected, rel=1e-6)
    assert table == torch.float32


def _hf_chunk() -> tuple[float, float, torch.dtype]:
    """Mean loss of the chunk, HF's own loss of the same tokens, and the rotary table's dtype after a cast."""
    import sys

    from tests.bench.conftest import BENCH

    sys.path.insert(0, str(BENCH))
    import hf_side
    import shapes
    from megatron.core.transformer.transformer_config import TransformerConfig
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shapes.hf_config("tiny"))
    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True)
    chunk = hf_side.HFChunk(config, model, model, None)
    ids = torch.randint(0, 256, (2, 9))
    losses = chunk(ids[:, :-1], None, None, labels=ids[:, 1:])
    expected = model(input_ids=ids, labels=ids).loss
    assert losses.shape == (2, 8)
    assert losses.dtype == torch.float32
    chunk.bfloat16()
    return losses.mean().item(), expected.item(), model.model.rotary_emb.inv_freq.dtype


NATIVE_MODELS = {
    "gpt": ("GPTModel", native.GPT),
    "hybrid": ("HybridModel", native.HYBRID),
    "own": ("HybridModel" if (MAJOR, MINOR) >= (0, 20) else "GPTModel", native.NATIVE),
}


@pytest.mark.parametrize(
    ("shape", "kind"),
    [("tiny", "own"), *itertools.product(("tiny", "moe-tiny", "qwen3-tiny"), ("gpt", "hybrid"))],
)
def test_native_computes_what_hf_computes(ranks: Any, shape: str, kind: str) -> None:
    """From the same weights the losses of all tokens are the same: the contenders differ in speed alone."""
    model, builder = NATIVE_MODELS[kind]
    ((built, found, expected),) = ranks.run(1, _native_losses, shape, builder)
    assert built == model
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", ["tiny", "qwen3-tiny"])
def test_so_does_native_over_tensor_parallel_ranks(ranks: Any, shape: str) -> None:
    every = ranks.run(2, _native_losses, shape, native.NATIVE, 2)
    for _, found, _ in every:
        torch.testing.assert_close(found, every[0][2], rtol=1e-5, atol=0)


def _native_losses(shape: str, builder: str, tp: int = 1) -> tuple[str, torch.Tensor, torch.Tensor]:
    """The class of Megatron's own model, and the loss of each token [b, s], of it with HF's weights and of HF."""
    import sys

    from tests.bench.conftest import BENCH

    sys.path.insert(0, str(BENCH))
    import hf_side
    import trainer_side

    setting = trainer_side.Setting(shape, micro_batch_size=2, rehearse=True, tp=tp)
    args = trainer_side.start(setting)
    own = trainer_side.build(args, builder).model[0]
    chunk = trainer_side.build(args, "hf_side.HFModelBuilder").model[0]
    assert isinstance(chunk.module, hf_side.HFChunk)
    native.fill(own.module, chunk.module.definition, torch.distributed.get_rank(), tp)
    batch = next(trainer_side.batches(setting))
    given = batch["tokens"], batch["position_ids"], None
    with torch.no_grad():
        losses = [model(*given, labels=batch["labels"]).cpu() for model in (own, chunk)]
    return type(own.module).__name__, losses[0], losses[1]
