"""Experts of a class of one's own, in HF's form: shared out only where the parts add up to the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from megasched.errors import ScheduleError
from megasched.language.parallel_dims import ParallelDims
from megasched.trainer.session import open_session
from megasched.verify.parity import LAYOUTS
from tests import remote
from tests.parity.cases import spread
from tests.parity.steps import assert_equal, step_of_own_code

HEAD = """
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralTopKRouter


class Mlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        own = MixtralConfig(
            hidden_size=config.hidden_size, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2
        )
        own._experts_implementation = "eager"
        self.gate = MixtralTopKRouter(own)
        self.experts = Experts(own)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        _, weights, index = self.gate(flat)
        return self.experts(flat, index, weights).view_as(x)


class Experts(MixtralExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
"""
RIGHT = {
    "scaled": "return 0.7 * super().forward(hidden_states, top_k_index, top_k_weights)",
    "weights at most": "return super().forward(hidden_states, top_k_index, top_k_weights.clamp(max=0.5))",
}
WRONG = {
    "weights add up to one": """
        top_k_weights = top_k_weights.square()
        top_k_weights = top_k_weights / top_k_weights.sum(-1, keepdim=True)
        return super().forward(hidden_states, top_k_index, top_k_weights)
""",
    "what all experts have": """
        hidden = super().forward(hidden_states, top_k_index, top_k_weights)
        return hidden + self.down_proj.mean((0, 2))
""",
    "a capacity": """
        capacity = top_k_index.numel() // self.num_experts
        places = nn.functional.one_hot(top_k_index.flatten(), self.num_experts).cumsum(0)
        places = places.gather(1, top_k_index.flatten()[:, None]).view_as(top_k_index)
        return super().forward(hidden_states, top_k_index, top_k_weights * (places <= capacity))
""",
}


def write(folder, body):
    """Of two layers: all that a mixture may do is tried in each."""
    return remote.write(folder, HEAD + "        " + body.strip() + "\n", num_hidden_layers=2)


def write_weights(folder):
    """In a rank: the class initialises no experts."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    torch.manual_seed(1)
    tensors = {name: 0.2 * torch.randn(held.shape) for name, held in model.named_parameters()}
    save_file(tensors, Path(folder, "model.safetensors"), metadata={"format": "pt"})


def assert_step_equal(ranks, folder, layout):
    ranks.run(1, write_weights, folder)
    assert_equal(step_of_own_code(ranks, folder, LAYOUTS[layout], random_init=False))


@pytest.mark.parametrize(("name", "layout"), spread(RIGHT, ["ep2", "cp2", "tp2-sp"]))
def test_what_adds_up_is_right(ranks, tmp_path, name, layout):
    assert_step_equal(ranks, write(tmp_path / "model", RIGHT[name]), layout)


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_add_up_is_refused_by_name(tmp_path, name):
    folder, layout = write(tmp_path / "model", WRONG[name]), ParallelDims(expert_model_parallel_size=2)
    with pytest.raises(ScheduleError) as raised:
        _ = open_session("auto", folder, layout, trust_remote_code=True).plan
    assert "model.layers.0.mlp.experts" in str(raised.value)
    assert "this Experts has the form that HF gives experts, but its experts and tokens" in str(raised.value)


@pytest.mark.parametrize(("name", "layout"), spread(WRONG, ["cp2", "tp2-sp"], twins=["weights add up to one"]))
def test_it_stays_whole_elsewhere(ranks, tmp_path, name, layout):
    assert_step_equal(ranks, write(tmp_path / "model", WRONG[name]), layout)
