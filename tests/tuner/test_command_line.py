"""Points as words of a command line."""

import pytest

from megasched.errors import ConfigError
from megasched.tuner.runner import check_command, point_words
from megasched.tuner.space import Space


def recompute(layers):
    return ["--recompute-granularity", "full", "--recompute-num-layers", layers] if layers else []


@pytest.fixture
def space():
    space = Space()
    pp = space.choice("pp", [1, 2])
    space.choice("vp", [2], when=pp > 1)
    space.choice("sp", [False, True])
    space.choice("layers", [0, 4], flag=recompute)
    space.choice("fp8_recipe", [None, "delayed"])
    space.choice("eps", [0, 0.5], flag="--norm-epsilon")
    space.choice("ratio", [0.5], schedule=True)
    space.choice("level", ["block"], schedule=True)
    space.choice("fast", [True], schedule=True)
    return space


def test_words_of_a_point(space):
    first = {"pp": 2, "vp": 2, "sp": True, "layers": 4, "fp8_recipe": "delayed", "eps": 0.5}
    options = {"ratio": 0.5, "level": "block", "fast": True}
    assert space.place({**first, **options}) is not None
    assert " ".join(point_words(space, {**first, **options})) == (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --sequence-parallel "
        "--recompute-granularity full --recompute-num-layers 4 --fp8-recipe delayed --norm-epsilon 0.5 "
        "--schedule-option ratio=0.5 level=block fast=true"
    )


def test_false_and_none_are_left_out_and_zero_is_a_number(space):
    point = {"pp": 1, "sp": False, "layers": 0, "fp8_recipe": None, "eps": 0}
    assert point_words(space, point) == ["--pipeline-model-parallel-size", "1", "--norm-epsilon", "0"]


def test_a_function_that_returns_no_words_is_refused():
    space = Space()
    space.choice("a", [1], flag=lambda value: f"--a {value}")
    with pytest.raises(ConfigError, match=r"a: the function of flag= returns a list of words; for 1: '--a 1'"):
        point_words(space, {"a": 1})


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ([], "there is no command"),
        (["torchrun", "--save", "x"], "--save: trials"),
        (
            ["torchrun", "--sequence-parallel"],
            "--sequence-parallel is in the command, and the space tries it as sp",
        ),
        (["torchrun", "--fp8-recipe=delayed"], "--fp8-recipe is in the command"),
    ],
)
def test_commands_that_can_not_be_tried(space, command, message):
    with pytest.raises(ConfigError, match=message):
        check_command(space, command)


def test_a_command_that_can(space):
    check_command(space, ["torchrun", "-m", "megasched", "pretrain_gpt.py", "--save-interval", "5"])
