"""Kernels of a layer on a ghost GPU, each level against Megatron's own model, with Transformer Engine."""

import sys
from functools import cache

import pytest

from tests.process import ROOT

sys.path.insert(0, str(ROOT / "bench"))  # scripts, which find each other there

import contenders
import kernels
import trainer_side

PARTS = ("forward", "backward")
FLAGS = ("--no-check-for-nan-in-loss-and-grad",)
# A rank of Llama, its width apart; further families in `make test-all`.
SHAPE = "cpu"

pytestmark = pytest.mark.usefixtures("transformer_engine")


@cache
def _layer(name, shape=SHAPE):
    """What a layer of a contender costs."""
    setting = trainer_side.Setting(shape, 1, True, extra=FLAGS)
    return kernels.count(contenders.all_contenders()[name], setting, te=True)


def test_the_host_waits_for_nothing_in_megatrons_layers():
    assert _layer("native")["waits"]["forward and backward"] == 0
    assert _layer("native")["waits"]["step, per layer"] == 0


def test_fused_comes_near_megatrons_layer():
    native, fused = _layer("native"), _layer("megasched_fused")
    for part in PARTS:
        assert fused[part]["kernels"] <= 1.15 * native[part]["kernels"]
    assert fused["kept_bytes"] <= 1.03 * native["kept_bytes"]
    assert fused["waits"] == native["waits"]


@pytest.mark.slow
def test_a_block_is_megatrons_layer():
    native, block = _layer("native"), _layer("megasched_block")
    for part in PARTS:
        assert block[part] == native[part]
    assert block["kept_bytes"] == native["kept_bytes"]
    assert block["waits"] == native["waits"]
