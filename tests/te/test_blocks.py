"""Level ``block`` with Transformer Engine's modules: what they are, their weights, and what they compute."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = Path(sys.prefix) / "te"  # where `make setup` puts it
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "seed_oss", "smollm3", "phi3")


@pytest.fixture(scope="module")
def found():
    assert MODULES.is_dir(), f"{MODULES} is missing: run `make setup`"
    path = os.pathsep.join([str(ROOT), str(MODULES)])
    run = subprocess.run(
        [sys.executable, "-m", "tests.te.blocks_case", *FAMILIES],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layer_is_made_of_transformer_engines_modules(found, family):
    classes = found[family]["classes"]
    assert {"TELayerNormColumnParallelLinear", "TERowParallelLinear", "TEDotProductAttention"} <= set(classes)
    assert not {"ColumnParallelLinear", "RowParallelLinear", "CoreAttention"} & set(classes)


@pytest.mark.parametrize("family", FAMILIES)
def test_output_and_every_gradient_equal_the_definitions(found, family):
    assert found[family]["missing"] == []
    assert {name: gap for name, gap in found[family]["distances"].items() if not gap < 1e-5} == {}


def test_it_is_not_importable_here():
    """Megatron would pick its optimizer and norms in every other test."""
    run = subprocess.run([sys.executable, "-c", "import transformer_engine"], capture_output=True, check=False)
    assert run.returncode != 0
