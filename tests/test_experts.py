"""Modules of experts are known by their form, whatever the architecture."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn
from transformers import MixtralForCausalLM
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from megasched import create_schedule
from megasched.definition.experts import expert_count, find_experts, is_experts, not_apart, returns_beyond
from megasched.definition.small_models.small_models import small_config
from megasched.errors import ScheduleError
from megasched.language.parallel_dims import ParallelDims
from megasched.language.tensor_types import INVARIANT, REPLICATE
from megasched.layers.megatron.trials import Trials
from megasched.model_adapters.default_schedule import schedule as default_schedule
from megasched.model_adapters.registry import roles_of
from megasched.plan.make import make_plan


def on_meta(model_type: str):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(small_config(model_type))


@pytest.mark.parametrize(
    ("model_type", "layers"),
    [
        *(("mixtral", 4), ("qwen3_moe", 4), ("olmoe", 4), ("deepseek_v3", 3), ("gpt_oss", 4), ("qwen2_moe", 4)),
        *(("llama4_text", 4), ("longcat_flash", 4)),
    ],
)
def test_found_in_every_layer_that_has_them(model_type, layers):
    found = find_experts(on_meta(model_type))
    assert list(found.values()) == [4] * layers
    assert all(path.endswith((".mlp.experts", ".feed_forward.experts")) for path in found)


@pytest.mark.parametrize("model_type", ["llama", "jetmoe"])
def test_not_found_where_there_are_none_of_that_form(model_type):
    """JetMoE's experts are called otherwise."""
    assert find_experts(on_meta(model_type)) == {}


def test_a_parameter_that_all_experts_share_excludes_a_module():
    model = on_meta("mixtral")
    model.model.layers[1].mlp.experts.norm = nn.LayerNorm(4, device="meta")
    model.model.layers[2].mlp.experts.scale = nn.Parameter(torch.empty(3, device="meta"))
    assert list(find_experts(model)) == ["model.layers.0.mlp.experts", "model.layers.3.mlp.experts"]


class Mixing(Llama4TextExperts):
    """Adds to each expert's rows what the one before makes of its own."""

    def forward(self, hidden_states):
        rows = super().forward(hidden_states)
        return rows + rows.roll(rows.shape[0] // self.num_experts, dims=0)


def test_batched_experts_that_mix_their_rows_stay_whole():
    model = on_meta("llama4_text")
    experts = model.model.layers[1].feed_forward.experts
    experts.__class__ = Mixing
    assert list(not_apart(model)) == ["model.layers.1.feed_forward.experts"]
    assert "model.layers.1.feed_forward.experts" not in find_experts(model)


def longcat() -> nn.Module:
    with torch.device("meta"):
        return LongcatFlashExperts(small_config("longcat_flash"))


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


class Twice(LongcatFlashExperts):
    """Has one that returns its input, and another that returns twice of it."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        more = (top_k_weights * (top_k_index == self.total_experts - 1)).sum(-1, keepdim=True)
        return super().forward(hidden_states, top_k_index, top_k_weights) + more * hidden_states


class Unweighted(LongcatFlashExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        weights = top_k_weights.masked_fill(top_k_index >= self.num_routed_experts, 1.0)
        return super().forward(hidden_states, top_k_index, weights)


def test_numbers_beyond_the_experts_choose_ones_that_return_their_input():
    """HF's other experts have none: such numbers make them fail, or HF's implementations leave them out."""
    experts = longcat()
    assert (expert_count(experts), returns_beyond(experts), is_experts(experts)) == (4, True, True)
    mixtral = on_meta("mixtral").model.layers[0].mlp.experts
    for implementation in ("eager", "grouped_mm"):
        mixtral.config._experts_implementation = implementation
        assert (returns_beyond(mixtral), is_experts(mixtral)) == (False, True)


@pytest.mark.parametrize("name", ["doubled", "twice", "unweighted"])
def test_other_experts_without_parameters_are_refused(name):
    experts = longcat()
    if name == "doubled":
        experts.identity_expert = Doubled()
    else:
        experts.__class__ = {"twice": Twice, "unweighted": Unweighted}[name]
    assert not is_experts(experts)
    model = nn.ModuleDict({"experts": experts})
    why = "numbers beyond its experts choose ones that do not return their input"
    assert not_apart(model) == {"experts": why}


class Passing(MixtralExperts):
    """Counts experts as HF does, and adds something for numbers beyond them."""

    factor = 1

    def forward(self, hidden_states, top_k_index, top_k_weights):
        beyond = top_k_index >= self.num_experts
        whole = super().forward(hidden_states, top_k_index * ~beyond, top_k_weights * ~beyond)
        return whole + self.factor * (top_k_weights * beyond).sum(-1, keepdim=True) * hidden_states


@pytest.mark.parametrize("factor", [0, 1, 2])
def test_experts_that_count_as_hfs_are_tried_with_numbers_beyond_them(factor):
    experts = on_meta("mixtral").model.layers[0].mlp.experts
    experts.config._experts_implementation = "eager"
    experts.__class__ = type("Passing", (Passing,), {"factor": factor})
    assert (returns_beyond(experts), is_experts(experts)) == {
        0: (False, True),
        1: (True, True),
        2: (False, False),
    }[factor]


@pytest.mark.parametrize(("experts", "beyond", "width"), [(64, 32, 64), (8, 24, 24)])
def test_numbers_of_experts_that_are_sizes_too(experts, beyond, width):
    config = small_config("longcat_flash")
    config.n_routed_experts, config.zero_expert_num, config.expert_ffn_hidden_size = experts, beyond, width
    with torch.device("meta"):
        assert is_experts(LongcatFlashExperts(config))


class Keeping(MixtralExperts):
    """Keeps what it is handed, for all of its kind."""

    kept: ClassVar[list[torch.Tensor]] = []

    def forward(self, hidden_states, top_k_index, top_k_weights):
        self.kept.append(hidden_states)
        return super().forward(hidden_states, top_k_index, top_k_weights)


def test_a_trial_leaves_nothing_behind():
    model = on_meta("mixtral")
    model.model.layers[0].mlp.experts.__class__ = Keeping
    assert len(find_experts(model)) == 4
    assert Keeping.kept == []


def test_experts_whose_forward_was_exchanged_stay_whole():
    model = on_meta("mixtral")
    experts = model.model.layers[0].mlp.experts
    experts.forward = experts.forward
    assert not_apart(model) == {"model.layers.0.mlp.experts": "it has a forward that is not its class's"}


def planned(model_type: str, layout: ParallelDims, schedule=default_schedule):
    model = on_meta(model_type)
    sch = create_schedule(model, layout, roles_of(model))
    schedule(sch, layout)
    return make_plan(sch, causal_lm=True, trials=Trials)


def test_auto_shares_out_every_parameter_of_the_experts():
    plan = planned("gpt_oss", ParallelDims(expert_model_parallel_size=2, data_parallel_size=2))
    assert plan.experts == {f"model.layers.{index}.mlp.experts": 1 for index in range(4)}
    shared = {name: plan.local_shape(p) for name, p in plan.placements.items() if p.group == "ep"}
    assert len(shared) == 16
    layer = "model.layers.0.mlp.experts."
    assert shared[layer + "gate_up_proj"] == (2, 64, 256)
    assert shared[layer + "gate_up_proj_bias"] == (2, 256)
    assert shared[layer + "down_proj"] == (2, 128, 64)
    assert shared[layer + "down_proj_bias"] == (2, 64)


def test_auto_shares_out_what_parameters_have_beyond_the_experts():
    plan = planned("longcat_flash", ParallelDims(expert_model_parallel_size=2, data_parallel_size=2))
    layer = "model.layers.0.mlp.experts"
    assert plan.returning == plan.experts.keys() == {f"model.layers.{index}.mlp.experts" for index in range(4)}
    first, last = (plan.placement(layer, name) for name in ("gate_up_proj", "down_proj"))
    assert (first.components, plan.local_shape(first), plan.local_shape(last)) == (
        (4, 4),
        (4, 64, 64),
        (2, 64, 32),
    )
    assert first.ranges(1, 2) == [(2, 4), (6, 8)]


def test_without_expert_parallelism_experts_stay_whole():
    plan = planned("mixtral", ParallelDims(tensor_model_parallel_size=2))
    assert not plan.experts
    assert {p.group for p in plan.placements.values()} == {"tp"}
    assert plan.placement("model.layers.0.mlp.experts", "down_proj").axis is None


def test_a_size_that_divides_no_experts_is_refused():
    with pytest.raises(ScheduleError, match=r"EP 3 does not divide gate_up_proj \[4, 256, 64\] along axis 0"):
        planned("mixtral", ParallelDims(expert_model_parallel_size=3))


def test_expert_parallelism_without_experts_is_refused():
    with pytest.raises(ScheduleError, match="no module of the form that HF gives experts"):
        planned("llama", ParallelDims(expert_model_parallel_size=2))
    with pytest.raises(ScheduleError, match=r'shard\("gate_up_proj", axis=0\)'):
        planned("mixtral", ParallelDims(expert_model_parallel_size=2), lambda sch, layout: None)


@pytest.mark.parametrize(("sequence_parallel", "region"), [(False, INVARIANT), (True, REPLICATE)])
def test_what_tokens_the_ranks_of_tensor_parallelism_have(sequence_parallel, region):
    """All have all of them; under SP the layer's whole mixture is one region, gathered at its entry."""
    layout = ParallelDims(
        tensor_model_parallel_size=2, sequence_parallel=sequence_parallel, expert_model_parallel_size=2
    )
    assert set(planned("mixtral", layout).tp_facts.experts.values()) == {region}


def with_router_losses(kind=None):
    """A small Mixtral on meta whose loss has HF's auxiliary part."""
    config = small_config("mixtral")
    config.output_router_logits = True
    with torch.device("meta"):
        return (kind or MixtralForCausalLM)(config)


def planned_with_sequence_parallelism(model):
    layout = ParallelDims(tensor_model_parallel_size=2, sequence_parallel=True)
    sch = create_schedule(model, layout, roles_of(model))
    default_schedule(sch, layout)
    return make_plan(sch, causal_lm=True, trials=Trials)


def test_logits_recorded_inside_of_regions_are_handed_on_whole():
    recorded = planned_with_sequence_parallelism(with_router_losses()).tp_facts.recorded
    names = {path: [torch.utils._pytree.keystr(leaf) for leaf in leaves] for path, leaves in recorded.items()}
    assert names == {"model": [f"['router_logits'][{layer}]" for layer in range(4)]}
    assert planned("mixtral", ParallelDims(tensor_model_parallel_size=2)).tp_facts.recorded == {}


def _keep(module, args, output):
    module.kept = output[0]


class Leaking(MixtralForCausalLM):
    """Reads a router's logits where nothing hands them out."""

    def __init__(self, config):
        super().__init__(config)
        self.model.layers[0].mlp.gate.register_forward_hook(_keep)

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + self.model.layers[0].mlp.gate.kept.mean()
        return output


def test_logits_that_leak_out_of_regions_are_refused():
    with pytest.raises(ScheduleError, match="from inside of a tensor-parallel region is read after the layers"):
        planned_with_sequence_parallelism(with_router_losses(Leaking))
