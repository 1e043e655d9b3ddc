"""Megatron's own trainer in 8 bits, from its flags to its checkpoints, with plain torch in the kernels' places."""

import json
from pathlib import Path

import pytest

from tests.process import TE, run_case

FP8 = "--fp8-format hybrid --fp8-recipe"
SAVE = "--ckpt-format torch_dist --override-opt-param-scheduler --save FOLDER/saved --save-interval 2"
LOAD = "--ckpt-format torch_dist --override-opt-param-scheduler --load FOLDER/saved"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LORA = str(Path(__file__).parents[2] / "examples" / "schedules" / "lora.py") + ":dropout=0.0"

RUNS = {
    "linears": {"family": "gemma2", "more": f"{FP8} tensorwise"},
    "without": {"family": "gemma2"},
    "recomputed": {"family": "gemma2", "flags": RECOMPUTE, "more": f"{FP8} delayed"},
    "blocks": {"family": "llama", "more": f"{FP8} delayed", "iterations": 4},
    "saved": {"family": "llama", "flags": SAVE, "more": f"{FP8} delayed", "iterations": 2},
    "resumed": {"family": "llama", "flags": LOAD, "more": f"{FP8} tensorwise", "iterations": 4},
    "resumed in 16 bits": {"family": "llama", "flags": LOAD, "iterations": 4},
    "adapted": {"family": "gemma2", "more": f"{FP8} tensorwise", "schedule": LORA},
    "adapted without": {"family": "gemma2", "schedule": LORA},
}
LINEARS = 4 * 4  # layers, and products in each
MICRO_BATCHES = 4


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("trainer"))
    runs = run_case(TE, "tests.te.trainer_case", folder, json.dumps(list(RUNS.values())), timeout=500)
    return dict(zip(RUNS, runs, strict=True))


def test_losses_and_norms_are_those_of_the_run_without(found):
    """The kernels are plain here, so nothing else may differ."""
    for name in ("linears", "recomputed"):
        assert found[name]["losses"] == pytest.approx(found["without"]["losses"], rel=1e-6)
        assert found[name]["norms"] == pytest.approx(found["without"]["norms"], rel=1e-6)


def test_the_recipe_is_the_flags(found):
    recipes = {name: run["recipes"] for name, run in found.items()}
    current, delayed = ["Float8CurrentScaling"], ["TEDelayedScaling"]
    assert recipes == {
        "linears": current,
        "without": [],
        "recomputed": delayed,
        "blocks": delayed,
        "saved": delayed,
        "resumed": current,
        "resumed in 16 bits": [],
        "adapted": current,
        "adapted without": [],
    }


def test_adapters_stand_beside_products_in_8_bits(found):
    """Four of the linears have one, and those of the adapters are no products of Transformer Engine."""
    assert found["adapted"]["losses"] == pytest.approx(found["adapted without"]["losses"], rel=1e-6)
    assert found["adapted"]["norms"] == pytest.approx(found["adapted without"]["norms"], rel=1e-6)
    assert found["adapted"]["norms"][0] < found["linears"]["norms"][0] / 2  # of the adapters alone
    assert len(found["adapted"]["first"]) == len(found["linears"]["first"])


@pytest.mark.parametrize("case", ["linears", "blocks"])
def test_weights_are_quantized_in_the_first_micro_batch_of_each_step(found, case):
    steps = RUNS[case].get("iterations", 3)
    assert found[case]["first"] == ([True] * LINEARS + [False] * LINEARS * (MICRO_BATCHES - 1)) * steps


def test_all_is_computed_twice_under_recompute(found):
    assert len(found["recomputed"]["first"]) == 2 * len(found["linears"]["first"])


@pytest.mark.parametrize("case", ["resumed", "resumed in 16 bits"])
def test_a_checkpoint_is_read_in_another_recipe_and_in_none(found, case):
    assert found[case]["losses"] == pytest.approx(found["blocks"]["losses"][2:], rel=2e-6)
    assert found[case]["norms"] == pytest.approx(found["blocks"]["norms"][2:], rel=1e-5)
