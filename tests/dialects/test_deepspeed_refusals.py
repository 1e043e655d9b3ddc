"""What ``megasched.initialize`` refuses, in words that name the key, before anything is built."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch import nn

import megasched
from megasched import ConfigError, ParallelDims
from megasched.dialects.deepspeed.config import REFUSED, read_config, value_at
from megasched.dialects.deepspeed.engine import imported
from megasched.verify.ranks.pool import init_megatron
from tests.dialects.steps import adamw, refusal
from tests.dialects.test_zero import zero_config
from tests.lowering.models import Mlp, tiny_model


def _nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize("key", REFUSED)
def test_a_key_that_a_scheduled_model_does_not_have_is_named(key):
    asked = 4 if isinstance(REFUSED[key][0], int) and not isinstance(REFUSED[key][0], bool) else True
    config = zero_config(1)
    config.update(_nested(key, asked) if key.split(".")[0] != "zero_optimization" else {})
    if key.startswith("zero_optimization."):
        config["zero_optimization"] = {"stage": 1, **_nested(key, asked)["zero_optimization"]}
    with pytest.raises(ConfigError, match=rf"{key} = {asked}: .*leave it out"):
        read_config(config)


def _unknown_keys() -> list[str]:
    """Refused keys that DeepSpeed's own source does not have; here, as importing it changes a process."""
    import inspect

    imported()
    from deepspeed.runtime import config as of_runtime
    from deepspeed.runtime import constants
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = {*DeepSpeedZeroConfig.model_fields, *TPTrainingConfig.model_fields}
    words = inspect.getsource(of_runtime) + inspect.getsource(constants)
    return [key for key in REFUSED if key.split(".")[-1] not in fields and key.split(".")[0] not in words]


def test_deepspeed_knows_the_keys_that_are_refused(deepspeed_ranks: Any) -> None:
    assert deepspeed_ranks.run(1, _unknown_keys) == [[]]


def test_their_values_that_mean_no_are_taken(tmp_path):
    config = zero_config(2)
    for key, (no, _) in REFUSED.items():
        first, _, rest = key.partition(".")
        if rest:
            config.setdefault(first, {})[rest] = no
        else:
            config[first] = no
    (tmp_path / "ds.json").write_text(json.dumps(config))
    assert read_config(tmp_path / "ds.json") == read_config(config) == config
    read_config({"tensor_parallel": {"autotp_size": 0}, "compression_training": {}})
    assert value_at(config, "zero_optimization.stage") == 2
    assert value_at(config, "zero_optimization.none.at.all") is None


def test_a_file_that_is_not_there_or_no_json(tmp_path):
    with pytest.raises(ConfigError, match=r"config=.*ds\.json"):
        read_config(tmp_path / "ds.json")
    (tmp_path / "ds.json").write_text("{")
    with pytest.raises(ConfigError, match="line 1"):
        read_config(tmp_path / "ds.json")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "config= is NoneType: give DeepSpeed's config, or its JSON file"),
        ([1], "config= is list"),
        ({"zero_optimization": True}, r'zero_optimization = True: write \{"stage": 1\}'),
        ({"gradient_clipping": "auto"}, "gradient_clipping = 'auto': HF's Trainer fills that in"),
        ({"optimizer": {"type": "Adam", "params": {"lr": "auto"}}}, r"optimizer\.params\.lr = 'auto'"),
    ],
)
def test_what_is_no_config_or_was_meant_for_another_trainer(config, words):
    with pytest.raises(ConfigError, match=words):
        read_config(config)


def test_words_of_deepspeed_s_own_are_taken():
    read_config({"pipeline": {"stages": "auto"}, "data_types": {"keep_in_fp32_modules": "auto"}})


@pytest.mark.parametrize(
    "door",
    [
        megasched.build,
        megasched.build_stage,
        lambda model: megasched.initialize(model, target="deepspeed", config={}),
        lambda model: megasched.verify(model, inputs={}),
    ],
    ids=["build", "build_stage", "initialize", "verify"],
)
def test_a_model_without_a_schedule(door):
    with pytest.raises(ConfigError, match=r"was given a Mlp: megasched\.create_schedule\(model, name='auto'\)"):
        door(Mlp())


def test_an_unknown_target():
    with pytest.raises(ConfigError, match="target='colossal': it is one of deepspeed"):
        megasched.initialize(megasched.create_schedule(Mlp()), target="colossal", config={})


def _refused() -> list[str]:
    """What each call says, in a process whose groups the first of them makes."""
    from megatron.core import parallel_state

    words = []
    for config, options, level in (
        ({"zero_optimization": {"stage": 3}}, {}, "fused"),
        ({}, {"optimizer": lambda model: adamw(nn.Linear(2, 2).parameters())}, None),
        ({}, {"model_parameters": lambda model: list(nn.Linear(2, 2).parameters())}, None),
        ({}, {"model_parameters": lambda model: (p for p in model.parameters())}, None),
    ):
        sch = megasched.create_schedule(Mlp())
        if level:
            sch["up"].level(level)
        given = {name: make(sch.mod) for name, make in options.items()}
        words.append(refusal(sch, {**zero_config(1), **config}, **{"optimizer": None, **given}))
    assert parallel_state.model_parallel_is_initialized()
    return words


def test_what_would_be_wrong_is_said(deepspeed_ranks: Any) -> None:
    ((level, optimizer, parameters, once),) = deepspeed_ranks.run(1, _refused)
    assert "zero_optimization.stage = 3" in level
    assert "up: fused" in level
    assert "take level leaf, or stage 2" in level
    assert "optimizer= has parameters that the built model does not" in optimizer
    assert "give a function of the parameters" in optimizer
    assert "model_parameters= has parameters" in parameters
    assert "model_parameters= is generator: give a list" in once


def _read_by_deepspeed() -> tuple[list[str], int]:
    """What is said of configs that DeepSpeed would refuse after the build, or read past, and how many built."""
    words, built = [], 0
    for config in (
        {"gradient_cliping": 1.0},
        {"zero_optimisation": {"stage": 3}, "note": "of mine"},
        {"zero_optimization": {"stage": 9}},
        {"zero_optimization": {"stage": "two"}},
        {"train_batch_size": 7},
        {"train_micro_batch_size_per_gpu": None},
    ):
        sch = megasched.create_schedule(Mlp())
        words.append(refusal(sch, {**zero_config(1), **config}))
        built += sch.built
    return words, built


def test_a_config_is_read_by_deepspeed_before_the_build(deepspeed_ranks: Any) -> None:
    (((clipping, zero, nine, two, batch, none), built),) = deepspeed_ranks.run(1, _read_by_deepspeed)
    assert "gradient_cliping: DeepSpeed 0.19.8 does not know this key, and would go on without it" in clipping
    assert "did you mean gradient_clipping?" in clipping
    assert "did you mean zero_optimization?" in zero
    assert "note: DeepSpeed 0.19.8 does not know this key, and would go on without it; leave it out" in zero
    for said in (nine, two, batch, none):
        assert said.startswith("DeepSpeed refuses its config: ")
    assert "stage" in nine
    assert "train_batch_size is not equal" in batch
    assert built == 0


def _of_whole_tensors() -> str:
    init_megatron(tp=2)
    config = {**zero_config(1), "optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}
    return refusal(megasched.create_schedule(Mlp()), config, optimizer=None)


def test_an_optimizer_that_takes_whole_tensors_is_refused_at_tp(deepspeed_ranks: Any) -> None:
    for said in deepspeed_ranks.run(2, _of_whole_tensors):
        assert "optimizer.type = 'Lamb'" in said
        assert "each of 2 TP ranks has parts" in said


def _built_before() -> str:
    init_megatron()
    sch = megasched.create_schedule(tiny_model("llama"), name="auto")
    megasched.build(sch)
    return refusal(sch, zero_config(3))


def _at_layout(size: str) -> str:
    init_megatron()
    return refusal(megasched.create_schedule(tiny_model("mixtral"), ParallelDims(**{size: 2})), zero_config(1))


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ("expert_model_parallel_size", "EP 2: ZeRO takes data-parallel ranks for replicas of all parameters"),
        ("context_parallel_size", "CP 2: DeepSpeed gives each rank samples of its own"),
    ],
)
def test_ranks_that_are_no_replicas_are_refused(deepspeed_ranks: Any, size: str, words: str) -> None:
    (said,) = deepspeed_ranks.run(1, _at_layout, size)
    assert words in said
    assert "train it by DDP or FSDP2" in said


def test_a_schedule_that_was_built_fused_is_not_for_stage_3(deepspeed_ranks: Any) -> None:
    (said,) = deepspeed_ranks.run(1, _built_before)
    assert "was built at level fused; call sch.level('leaf') before, or take stage 2" in said
