"""8-bit training with Transformer Engine's Python modules: contexts, recompute, state, and what is computed.

Its kernels are plain torch here (plain.py), so numbers are those of float32; that 8 bits are as good is not shown.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parity.cases import case

ROOT = Path(__file__).parents[2]
MODULES = Path(sys.prefix) / "te"  # where `make setup` puts it
CURRENT, DELAYED = "Float8CurrentScaling", "TEDelayedScaling"
LAYERS, LINEARS = 4, 4  # qkv, proj, fc1, fc2

ALONE = {
    "tensorwise": {"family": "llama", "fp8": {"fp8_recipe": "tensorwise"}},
    "delayed": {"family": "qwen3", "fp8": {"fp8_recipe": "delayed"}},
    "ends in bf16": {
        "family": "qwen2",
        "fp8": {"fp8_recipe": "blockwise", "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 2},
        "config": {
            "first_last_layers_bf16": True,
            "num_layers_at_start_in_bf16": 1,
            "num_layers_at_end_in_bf16": 2,
        },
    },
    "recomputed": {
        "family": "llama",
        "fp8": {"fp8_recipe": "tensorwise"},
        "config": {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    },
    "recomputed, delayed": {
        "family": "llama",
        "fp8": {"fp8_recipe": "delayed"},
        "calls": 'sch["model.layers"][1:3].checkpoint()',
    },
}

FUSED = 'sch["model.layers.*"].level("fused")'
OPT = {"hidden_size": 64, "ffn_dim": 96, "word_embed_proj_dim": 64}
TENSORWISE = {"fp8_recipe": "tensorwise"}

IN_LINEARS = {
    "llama": {"family": "llama", "fp8": TENSORWISE, "calls": FUSED},
    "llama, distributed": {"family": "llama", "fp8": TENSORWISE, "calls": FUSED, "distributed_optimizer": True},
    "qwen2, biases": {"family": "qwen2", "fp8": TENSORWISE, "calls": FUSED},
    "qwen2, biases, distributed": {
        "family": "qwen2",
        "fp8": TENSORWISE,
        "calls": FUSED,
        "distributed_optimizer": True,
    },
    "apart": {"family": "qwen3", "fp8": TENSORWISE, "calls": FUSED.replace("fused", "leaf")},
    "some in bf16": {
        "family": "gemma2",
        "fp8": {"fp8_recipe": "tensorwise", "num_layers_at_start_in_bf16": 1},
        "config": {"first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 0},
    },
    "recomputed, delayed": {
        "family": "gemma2",
        "fp8": {"fp8_recipe": "delayed"},
        "calls": 'sch["model.layers.*.mlp"].checkpoint()',
    },
}

ON_TWO_RANKS = {
    f"{family}{', SP' if split else ''}": {
        "family": family,
        "fp8": TENSORWISE,
        "changes": changes,
        "calls": calls,
        "sequence_parallel": split,
    }
    for family, changes, calls in (
        ("llama", {}, FUSED),
        ("qwen3", {}, FUSED),
        ("gemma2", {}, ""),
        ("phi3", {"num_key_value_heads": 4}, FUSED),
        ("gpt2", {}, FUSED.replace("model.layers", "transformer.h")),
        ("opt", OPT, FUSED.replace("model.layers", "model.decoder.layers")),
        ("gpt_neox", {}, ""),
    )
    for split in (False, True)
}


# Each family with sequence parallelism or without it, in turn.
FAST_ON_TWO_RANKS = [name for number, name in enumerate(ON_TWO_RANKS) if number % 4 in (0, 3)]
OVERLAP = {"overlap": {"family": "llama", "overlap": True}}


def run(cases, world, tmp_path):
    """What rank 0 of ``world`` processes found for each case."""
    assert MODULES.is_dir(), f"{MODULES} is missing: run `make setup`"
    path = os.pathsep.join([str(ROOT), str(MODULES)])
    store, given = str(tmp_path / "store"), json.dumps(list(cases.values()))
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.te.model_case", str(rank), str(world), store, given],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    ended = [process.communicate(timeout=300) for process in started]
    for process, (_, errors) in zip(started, ended, strict=True):
        assert process.returncode == 0, errors[-4000:]
    return dict(zip(cases, json.loads(ended[0][0].splitlines()[-1]), strict=True))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run(ALONE, 1, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def in_linears(tmp_path_factory):
    return run(IN_LINEARS, 1, tmp_path_factory.mktemp("linears"))


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    cases = {name: ON_TWO_RANKS[name] for name in FAST_ON_TWO_RANKS}
    return run({**cases, **OVERLAP}, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def others_on_two_ranks(tmp_path_factory):
    cases = {name: each for name, each in ON_TWO_RANKS.items() if name not in FAST_ON_TWO_RANKS}
    return run(cases, 2, tmp_path_factory.mktemp("others"))


def recipes(found, step=0):
    """Recipes that the linears were called in: of each layer in the forward, and of the calls in the backward."""
    products = found["steps"][step]["products"]
    forward = found["steps"][step]["forward"]
    by_layer = [{p["recipe"] for p in products[i : i + LINEARS]} for i in range(0, forward, LINEARS)]
    return by_layer, [p["recipe"] for p in products[forward:]]


def assert_equals_hf(found):
    assert found["loss"] < 1e-6
    assert found["missing"] == []
    assert {name: gap for name, gap in found["distances"].items() if not gap < 1e-5} == {}


@pytest.mark.parametrize("case", ALONE)
def test_loss_and_every_gradient_equal_the_definitions(alone, case):
    assert_equals_hf(alone[case])


@pytest.mark.parametrize(("case", "recipe"), [("tensorwise", CURRENT), ("delayed", DELAYED)])
def test_every_layer_is_in_the_recipe_asked_for(alone, case, recipe):
    assert recipes(alone[case]) == ([{recipe}] * LAYERS, [])


def test_the_first_and_last_layers_stay_in_16_bits(alone):
    assert recipes(alone["ends in bf16"])[0] == [{""}, {"Float8BlockScaling"}, {""}, {""}]


def test_what_is_recomputed_is_in_8_bits_again(alone):
    forward, again = recipes(alone["recomputed"])
    assert (forward, again) == ([{CURRENT}] * LAYERS, [CURRENT] * LAYERS * LINEARS)
    forward, again = recipes(alone["recomputed, delayed"])
    assert (forward, again) == ([{DELAYED}] * LAYERS, [DELAYED] * 2 * LINEARS)


def test_weights_are_quantized_once_a_step(alone):
    first, second = alone["tensorwise"]["steps"]
    assert {product["first"] for product in first["products"]} == {True}
    assert {product["first"] for product in second["products"]} == {False}


def test_automatic_schedules_take_megatrons_layers(alone):
    assert "TELayerNormColumnParallelLinear" in alone["tensorwise"]["classes"]
    assert "LlamaDecoderLayer" not in alone["tensorwise"]["classes"]


@pytest.mark.parametrize("case", ALONE)
def test_checkpoints_have_no_entry_beside_the_parameters(alone, case):
    """Transformer Engine keeps ``_extra_state``, which no HF folder and no other level knows."""
    assert not [name for name in alone[case]["entries"] if "extra_state" in name]
    assert alone[case]["reload"] == "<All keys matched successfully>"


@pytest.mark.parametrize("case", IN_LINEARS)
def test_linears_of_a_definition_equal_its_own(in_linears, case):
    assert_equals_hf(in_linears[case])
    assert in_linears[case]["reload"] == "<All keys matched successfully>"
    assert not [name for name in in_linears[case]["entries"] if "extra_state" in name]


@pytest.mark.parametrize("name", [case(name, fast=name in FAST_ON_TWO_RANKS) for name in ON_TWO_RANKS])
def test_linears_on_two_ranks_equal_the_definitions(request, name):
    """Communication is Megatron's own and real here."""
    on_ranks = "on_two_ranks" if name in FAST_ON_TWO_RANKS else "others_on_two_ranks"
    found = request.getfixturevalue(on_ranks)[name]
    assert_equals_hf(found)
    assert {"TeColumnLinear", "TeRowLinear"} <= set(found["classes"])
    assert {product["recipe"] for product in found["steps"][0]["products"]} == {CURRENT}


def joined(found):
    """Weight of a product -> whether several parameters are read as one, without a copy."""
    return {tuple(p["features"]): p["joined"] for p in found["steps"][0]["products"]}


def test_columns_are_one_product_also_in_megatrons_buffers(in_linears):
    """[q + k + v, h], [h, q], [gate + up, h], [h, mlp]."""
    expected = {(128, 64): True, (64, 64): False, (192, 64): True, (64, 96): False}
    assert joined(in_linears["llama"]) == expected
    assert joined(in_linears["llama, distributed"]) == expected
    assert joined(in_linears["qwen2, biases"]) == expected
    # The distributed optimizer lays biases between the weights: Transformer Engine copies them together.
    assert joined(in_linears["qwen2, biases, distributed"]) == {**expected, (128, 64): False}


def test_leaves_are_products_of_their_own(in_linears):
    assert joined(in_linears["apart"]) == dict.fromkeys([(64, 64), (32, 64), (96, 64), (64, 96)], False)


def test_layers_in_16_bits_keep_megatrons_linears(in_linears):
    found = in_linears["some in bf16"]
    assert len(found["steps"][0]["products"]) == (LAYERS - 1) * LINEARS
    assert {"ColumnLinear", "RowLinear", "TeColumnLinear", "TeRowLinear"} <= set(found["classes"])


def test_a_recomputed_part_of_a_layer_is_in_8_bits_again(in_linears):
    forward, again = recipes(in_linears["recomputed, delayed"])
    assert (forward, again) == ([{DELAYED}] * LAYERS, [DELAYED] * LAYERS * 2)


def test_linears_quantize_their_weights_once_a_step(in_linears):
    first, second = in_linears["llama"]["steps"]
    assert {product["first"] for product in first["products"]} == {True}
    assert {product["first"] for product in second["products"]} == {False}


def test_megatrons_layers_overlap_communication(on_two_ranks):
    assert on_two_ranks["overlap"] == {
        "self_attention.linear_qkv": ["qkv", "ub_overlap_ag_fprop", "ub_bulk_wgrad", "ub_bulk_dgrad"],
        "self_attention.linear_proj": ["proj", "ub_overlap_rs_fprop", "ub_overlap_ag_dgrad"],
        "mlp.linear_fc1": ["fc1", "ub_overlap_ag_fprop", "ub_bulk_wgrad", "ub_bulk_dgrad"],
        "mlp.linear_fc2": ["fc2", "ub_overlap_rs_fprop", "ub_overlap_ag_dgrad"],
    }
