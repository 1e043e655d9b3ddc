"""Estimates of a layer's time from what was counted."""

import sys

import pytest

from tests.process import ROOT

sys.path.insert(0, str(ROOT / "bench"))  # scripts, which find each other there

import roofline

SETTING = {"shape": "1b", "micro_batch_size": 2, "extra": []}
EIGHT = {**SETTING, "extra": ["--fp8-format", "hybrid"]}


def _layer(moved=0, launched=0, products=0):
    by_name = {"gemm:LtMatmul 1000x2000x3000": products, "kernel:other": launched}
    return {
        "forward": {"kernels": launched, "by_name": by_name},
        "backward": {"kernels": 0, "by_name": {}},
        "moved_bytes": {"all": moved},
    }


def test_each_term_is_there():
    """Of an H100: 989 TFLOP/s, products at 0.75 and attention at 0.55; 3,350 GB/s at 0.85; 2.5 us a kernel."""
    layers = {"native": _layer(), "moves": _layer(moved=10**9), "launches": _layer(launched=40)}
    found = roofline.milliseconds(SETTING, layers)
    attention = 4 * (4096 * 4096 / 2) * 2048 * 2 * 3.5  # FLOPs: 32 heads of 64, two rows, forward and backward
    assert found["native"] == pytest.approx(1e3 * attention / (989e12 * 0.55))
    assert found["moves"] - found["native"] == pytest.approx(1e3 * 1e9 / (3350e9 * 0.85))
    assert found["launches"] - found["native"] == pytest.approx(40 * 2.5e-3)


def test_products_are_megatrons_for_all():
    bare = roofline.milliseconds(SETTING, {"native": _layer(), "other": _layer(products=5)})
    busy = roofline.milliseconds(SETTING, {"native": _layer(products=5), "other": _layer()})
    assert bare["native"] == bare["other"]
    assert busy["native"] == busy["other"]
    assert busy["other"] - bare["other"] == pytest.approx(1e3 * 5 * 2 * 1000 * 2000 * 3000 / (989e12 * 0.75))


def test_products_in_8_bits_are_faster_and_attention_is_not():
    """1,979 TFLOP/s at 0.65."""
    bare, busy = (roofline.milliseconds(EIGHT, {"native": _layer(products=count)})["native"] for count in (0, 5))
    assert bare == roofline.milliseconds(SETTING, {"native": _layer()})["native"]
    assert busy - bare == pytest.approx(1e3 * 5 * 2 * 1000 * 2000 * 3000 / (1979e12 * 0.65))
