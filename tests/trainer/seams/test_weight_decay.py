"""Weight decay of biases and norms of two dimensions: there without the patch, gone with it, at any level."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from megasched.definition.small_models.shrink import TOKENS
from megasched.definition.small_models.small_models import write_small_model
from megasched.plan.param_mapping import ParamMapping
from megasched.plan.placement import Placement
from megasched.trainer.seams import registry
from megasched.trainer.weight_decay import SPARED, spare, spared_names
from megasched.verify.trainer_run import train
from tests.parity.instances import instances_of
from tests.parity.levels import SCHEDULE


def _decayed(folder, schedule):
    """Names in HF of what is decayed, without their layers."""
    from megatron.training import training

    from megasched.trainer.scheduled_model import ScheduledModel

    real, made = training.get_megatron_optimizer, []

    def kept(*args, **kwargs):
        made.append(real(*args, **kwargs))
        return made[-1]

    training.get_megatron_optimizer = kept
    try:
        with instances_of(ScheduledModel) as models:
            train(folder, [], iterations=1, schedule=schedule, tokens=TOKENS)
    finally:
        training.get_megatron_optimizer = real
    held = {id(parameter): assembly.name for parameter, assembly in models[0]._checkpointed().values()}
    groups = [group for group in made[0].param_groups if group["wd_mult"]]
    names = {held[id(parameter)] for group in groups for parameter in group["params"]}
    every = {part for name in names for part in name.split(" + ")}  # one parameter may be made of several
    return {name.partition(".layers.")[2].partition(".")[2] or name for name in every}


CASES = {
    "gpt_oss": ["mlp.experts.down_proj", "mlp.experts.gate_up_proj", "mlp.router.weight"],
    "cohere": ["mlp.down_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight"],
}
ATTENTION = [f"self_attn.{name}_proj.weight" for name in "kqov"]


@pytest.mark.parametrize(
    ("model_type", "level"), [("gpt_oss", "fused"), ("gpt_oss", "block"), ("cohere", "fused")]
)
def test_biases_and_norms_of_several_dimensions_are_not_decayed(ranks, tmp_path, model_type, level):
    """Those of all experts, and norms of heads."""
    (folder,) = ranks.run(1, write_small_model, model_type, str(tmp_path / "model"))
    if model_type == "cohere":
        config = Path(folder, "config.json")
        config.write_text(json.dumps({**json.loads(config.read_text()), "use_qk_norm": True}))
    schedule = tmp_path / "level.py"
    schedule.write_text(SCHEDULE.format(where="model.layers.*", level=level))
    (decayed,) = ranks.run(1, _decayed, folder, str(schedule))
    assert sorted(decayed - {"model.embed_tokens.weight", "lm_head.weight"}) == sorted(
        [*CASES[model_type], *ATTENTION]
    )


class Heads(nn.Module):
    """Two dimensions each: a norm, a bias, and a matrix that only has such a name in front."""

    def __init__(self):
        super().__init__()
        self.q_norm = OwnNorm()
        self.position_bias = nn.Parameter(torch.ones(2, 4))
        self.bias_table = nn.Linear(4, 2, bias=False)


class OwnNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, 4))


def test_what_is_spared_is_told_by_module_and_name():
    model = Heads()
    names = spared_names(model)
    assert names == {"q_norm.scale", "position_bias"}
    held = [(param, ParamMapping((Placement(name, (2, 4)),))) for name, param in model.named_parameters()]
    spare(held, names)
    assert {name for name, param in model.named_parameters() if hasattr(param, SPARED)} == names


def _spared():
    """Whether what Megatron's trainer makes its optimizer of spares such a parameter: patched, and not."""
    from megatron.core.optimizer import OptimizerConfig
    from megatron.training import training

    parameter = nn.Parameter(torch.ones(4, 8))
    setattr(parameter, SPARED, True)

    def spared():
        keys = training.get_standard_config_overrides(OptimizerConfig())
        return any(key.matches(parameter, "model.layers.0.self_attn.q_norm.weight") for key in keys)

    registry.apply("weight_decay")
    with_patch = spared()
    registry.undo("weight_decay")
    without = spared()
    registry.apply("weight_decay")
    return with_patch, without


def test_megatron_would_decay_them(ranks):
    assert ranks.run(1, _spared) == [(True, False)]
