"""Weight decay of experts' biases: there without the patch, gone with it, whoever computes the experts."""

import pytest
import torch

from megasched import patches
from megasched.verify.shrink import TOKENS
from megasched.verify.small_models import write_small_model
from megasched.verify.trainer_run import train
from tests.parity.instances import instances_of


def _decayed(folder, schedule):
    """Names in HF of what is decayed, of gpt-oss's experts."""
    from megatron.training import training

    from megasched.megatron.scheduled_model import ScheduledModel

    real, made = training.get_megatron_optimizer, []

    def kept(*args, **kwargs):
        made.append(real(*args, **kwargs))
        return made[-1]

    training.get_megatron_optimizer = kept
    try:
        with instances_of(ScheduledModel) as models:
            train(folder, [], iterations=1, schedule=schedule, random_init=False, tokens=TOKENS)
    finally:
        training.get_megatron_optimizer = real
    held = {id(parameter): assembly.name for parameter, assembly in models[0]._checkpointed().values()}
    groups = [group for group in made[0].param_groups if group["wd_mult"]]
    names = {held[id(parameter)] for group in groups for parameter in group["params"]}
    return {name.rpartition(".")[2] for name in names if ".experts." in name}


@pytest.mark.parametrize("level", ["fused", "block"])
def test_biases_of_experts_are_not_decayed(ranks, tmp_path, level):
    (folder,) = ranks.run(1, write_small_model, "gpt_oss", str(tmp_path / "model"))
    schedule = tmp_path / "level.py"
    schedule.write_text(
        "from megasched.model_adapters.default_schedule import schedule as default\n\n\n"
        "def schedule(sch, layout):\n    default(sch, layout)\n"
        f"    sch['model.layers.*.mlp'].level('{level}')\n"
    )
    (decayed,) = ranks.run(1, _decayed, folder, str(schedule))
    assert decayed == {"gate_up_proj", "down_proj"}


def _spared():
    """Whether what Megatron's trainer makes its optimizer of spares such a parameter: patched, and not."""
    from megatron.core.optimizer import OptimizerConfig
    from megatron.training import training

    def spared():
        keys = training.get_standard_config_overrides(OptimizerConfig())
        parameter = torch.nn.Parameter(torch.ones(4, 8))
        return any(key.matches(parameter, "model.layers.0.mlp.experts.gate_up_proj_bias") for key in keys)

    patches.apply("expert_biases")
    with_patch = spared()
    patches.undo("expert_biases")
    without = spared()
    patches.apply("expert_biases")
    return with_patch, without


def test_megatron_would_decay_them(ranks):
    assert ranks.run(1, _spared) == [(True, False)]
