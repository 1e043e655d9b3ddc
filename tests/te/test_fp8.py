"""8-bit training with Transformer Engine's Python modules: contexts, recompute, state, and what is computed.

Its kernels are plain torch here (plain.py), so numbers are those of float32; that 8 bits are as good is not shown.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
