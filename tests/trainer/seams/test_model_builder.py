"""Which of Megatron's models a scheduled one stands for, and what ends a run instead."""

from types import SimpleNamespace

import pytest

from megasched import patches
from megasched.attributes import resolve
from megasched.errors import ConfigError
from megasched.trainer.seams import model_builder
from megasched.verify.trainer_run import train
from tests import tiny


def builder_of(*names):
    """The class that Megatron would build by, of configs with these builders of their own."""
    patches.apply("model_builder")
    asked = resolve("megatron.training.models.base:ModelConfig.get_builder_cls")
    return [asked(SimpleNamespace(builder=name)).__name__ for name in names]


def test_it_stands_for_both_of_megatrons_own(ranks):
    assert ranks.run(1, builder_of, *model_builder.REPLACED) == [["ScheduledModelBuilder"] * 2]


def test_megatron_has_the_builders_that_are_replaced(ranks):
    assert ranks.run(1, own_builders) == [list(model_builder.REPLACED)]


def own_builders():
    names = ("gpt:GPT", "hybrid:Hybrid")
    return [resolve(f"megatron.training.models.{name}ModelConfig").builder for name in names]


def test_another_model_ends_the_run(ranks):
    with pytest.raises(
        Exception, match=r"ConfigError: the script describes a model by SimpleNamespace, which a\.B builds"
    ):
        ranks.run(1, builder_of, "a.B")


def provided():
    patches.apply("model_builder")
    from megatron.training.training import get_model

    with pytest.raises(ConfigError, match=r"a function that makes its model .*pretrain_hybrid\.py"):
        get_model(lambda pre_process, post_process: None)
    return True


def test_so_does_a_function_that_makes_one(ranks):
    assert ranks.run(1, provided) == [True]


def losses_without_gpt_model(folder, kept):
    """Losses of two steps, where Megatron describes no GPTModel any more."""
    from megatron.training import argument_utils

    with pytest.MonkeyPatch.context() as changed:
        if not kept:
            changed.delattr(argument_utils, "gpt_config_from_args")
        return train(folder, [], iterations=2).losses


def test_the_bundled_script_outlives_gpt_model(ranks, tmp_path):
    folder = tiny.save("llama", tmp_path)
    with_it, without = (ranks.run(1, losses_without_gpt_model, folder, kept) for kept in (True, False))
    assert len(with_it[0]) == 2
    assert without == with_it
