"""Kernels of a layer on a ghost GPU, each level against Megatron's own model, with Transformer Engine."""

import sys
from functools import cache

import pytest

from tests.process import ROOT

sys.path.insert(0, str(ROOT / "bench"))  # scripts, which find each other there

import contenders
import layer_kernels
import trainer_side

PARTS = ("forward", "backward")
FLAGS = ("--no-check-for-nan-in-loss-and-grad",)
# A rank of Llama, its width apart; further families in `make test-all`.
SHAPE = "cpu"

pytestmark = pytest.mark.usefixtures("transformer_engine")


@cache
def _layer(name, shape=SHAPE, ranks=1, flags=()):
    """What a layer of a contender costs a rank."""
    setting = trainer_side.Setting(shape, 1, True, extra=(*FLAGS, *flags), replicas=ranks)
    return layer_kernels.count(contenders.all_contenders()[name], setting, te=True, ranks=ranks)


def test_the_host_waits_for_nothing_in_megatrons_layers():
    assert _layer("native")["waits"]["forward and backward"] == 0
    assert _layer("native")["waits"]["step, per layer"] == 0


def test_fused_comes_near_megatrons_layer():
    native, fused = _layer("native"), _layer("megasched_fused")
    for part in PARTS:
        assert fused[part]["kernels"] <= 1.15 * native[part]["kernels"]
    assert fused["kept_bytes"] <= 1.03 * native["kept_bytes"]
    assert fused["moved_bytes"]["all"] <= 1.1 * native["moved_bytes"]["all"]
    assert fused["waits"] == native["waits"]


# Shape -> the most kernels, bytes kept and bytes moved, beside Megatron's. Gemma 2 has two norms more, of three
# kernels each in the backward, and keeps their inputs.
FAMILIES = {
    "qwen3-1.7b": (1.15, 1.03, 1.1),
    "gpt2-xl": (1.15, 1.03, 1.1),
    "mixtral": (1.15, 1.03, 1.1),
    "gemma2-2b": (1.15 * (25 + 6) / 25, 1.2, 1.1),
}


EP2 = ("--expert-model-parallel-size", "2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "ranks", "flags"), [*((shape, 1, ()) for shape in FAMILIES), ("mixtral", 2, EP2)]
)
def test_so_it_does_in_other_families(shape, ranks, flags):
    native, fused = (_layer(name, shape, ranks, flags) for name in ("native", "megasched_fused"))
    launched, kept, moved = FAMILIES[shape]
    for part in PARTS:
        assert fused[part]["kernels"] <= launched * native[part]["kernels"]
    assert fused["kept_bytes"] <= kept * native["kept_bytes"]
    assert fused["moved_bytes"]["all"] <= moved * native["moved_bytes"]["all"]
    assert fused["waits"]["forward and backward"] <= native["waits"]["forward and backward"]


@pytest.mark.slow
def test_a_block_is_megatrons_layer():
    native, block = _layer("native"), _layer("megasched_block")
    for part in PARTS:
        assert block[part] == native[part]
    assert block["kept_bytes"] == native["kept_bytes"]
    assert block["waits"] == native["waits"]
