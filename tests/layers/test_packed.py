"""Rows of several sequences: places, masks, what Transformer Engine is told, and which definitions mix them."""

from __future__ import annotations

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megasched.analysis.analysis_cache import AnalysisCache
from megasched.analysis.cp.packed_sequences import one_sequence_a_row, plan_packed
from megasched.analysis.find_layer_stack import find_layer_stack
from megasched.definition.build import build_definition
from megasched.definition.small_models.small_models import small_config
from megasched.errors import ConfigError, ScheduleError
from megasched.language.parallel_dims import ParallelDims
from megasched.language.schedule import create_schedule
from megasched.layers import attention
from megasched.layers.megatron.trials import Trials
from megasched.layers.packed import PackedRows, is_packed_mask, packed_mask
from megasched.model_adapters.default_schedule import schedule as default
from megasched.model_adapters.registry import roles_of
from megasched.plan.make import make_plan
from megasched.trainer.packed_batch import unpack_rows
from tests import tiny

BOUNDS = torch.tensor([0, 2, 5, 6, 10], dtype=torch.int32)
ROWS = PackedRows(BOUNDS, 4, 2, 5)


def test_places_begin_anew_with_each_sequence():
    assert ROWS.numbers().tolist() == [[0, 0, 1, 1, 1], [2, 3, 3, 3, 3]]
    assert ROWS.positions().tolist() == [[0, 1, 0, 1, 2], [0, 0, 1, 2, 3]]
    assert ROWS.several
    assert not PackedRows(torch.tensor([0, 5, 10]), 5, 2, 5).several


def test_the_mask_is_causal_inside_of_a_sequence_and_the_window_counts_the_token_itself():
    first, second = packed_mask(BOUNDS, 2, 5)[:, 0].int().tolist()
    assert first == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert second[4] == [0, 1, 1, 1, 1]
    assert packed_mask(BOUNDS, 2, 5, window=2)[1, 0, 4].int().tolist() == [0, 0, 0, 1, 1]


def test_a_mask_that_says_more_is_not_taken_for_that_of_packed_sequences():
    mask = packed_mask(BOUNDS, 2, 5)
    assert is_packed_mask(mask.clone(), BOUNDS, None)
    assert not is_packed_mask(mask.clone(), BOUNDS, 2)
    assert is_packed_mask(packed_mask(BOUNDS, 2, 5, 2), BOUNDS, 2)
    chunked = mask.clone()
    chunked[1, 0, 4, 1] = False
    assert not is_packed_mask(chunked, BOUNDS, None)
    assert not is_packed_mask(mask[:1].clone(), BOUNDS, None)  # of one row alone
    assert not is_packed_mask(torch.zeros(2, 1, 5, 5), BOUNDS, None)  # additive


def test_what_is_not_as_megatrons_data_set_says_it_is_refused():
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=BOUNDS, max_seqlen_q=4)
    assert unpack_rows(params, 2, 5).positions().equal(ROWS.positions())
    params.qkv_format = "sbhd"
    with pytest.raises(ConfigError, match="PackedSeqParams with qkv_format='thd'"):
        unpack_rows(params, 2, 5)


def plan_of(model_type):
    model = build_definition(small_config(model_type))
    attention.enable(model)
    structure = find_layer_stack(model)
    with one_sequence_a_row():
        sequence = AnalysisCache().plan_sequence(model, structure, 2, lambda path: "")
    return plan_packed(model, structure, sequence)


@pytest.mark.parametrize("model_type", ["llama", "gpt_oss", "opt", "afmoe"])
def test_attention_that_hf_masks_keeps_sequences_apart(model_type):
    plan = plan_of(model_type)
    assert plan.problems == []
    assert plan.hands_on_bounds


@pytest.mark.parametrize(
    ("model_type", "module", "said"),
    [
        ("qwen3_next", "model.layers.0.linear_attn", "mixes tokens otherwise than by attention"),
        ("lfm2", "model.layers.0.conv", "mixes tokens otherwise than by attention"),
        ("falcon", "transformer.h.0.self_attention", "mixes tokens otherwise than by attention"),
        ("mamba", "", "takes no position_ids"),
        ("bloom", "", "takes no position_ids"),
    ],
)
def test_what_else_carries_one_sequence_into_the_next_is_found(model_type, module, said):
    problem = plan_of(model_type).problems[0]
    assert problem.module == module
    assert said in problem.what
    assert "one conversation a line" in problem.remedy


def test_a_definition_whose_masks_are_its_own_is_found(monkeypatch):
    from transformers.models.llama import modeling_llama

    def own_mask(config, inputs_embeds, *args, **kwargs):
        return torch.ones(inputs_embeds.shape[1], inputs_embeds.shape[1], dtype=torch.bool).tril()[None, None]

    monkeypatch.setattr(modeling_llama, "create_causal_mask", own_mask)
    assert "mask" in plan_of("llama").problems[0].what


@pytest.mark.parametrize("where", ["model.layers.*", "model.layers.*.self_attn"])
def test_megatrons_attention_and_sequence_parallelism_take_one_row(where):
    """It is given rows as one; split along the sequence, they would not lie one after the other."""

    def plan(micro_batch_size):
        model = build_definition(tiny.config("llama"))
        attention.enable(model)
        layout = ParallelDims(
            tensor_model_parallel_size=2,
            sequence_parallel=True,
            micro_batch_size=micro_batch_size,
            packed_sequences=True,
        )
        sch = create_schedule(model, layout, roles_of(model))
        default(sch, layout)
        sch[where].level("block")
        return make_plan(sch, causal_lm=True, trials=Trials)

    assert plan(1).packed.hands_on_bounds
    with pytest.raises(ScheduleError, match="takes packed sequences as one row"):
        plan(2)
