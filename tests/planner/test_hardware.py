"""Hardware as data: what is read, what is refused, and how long work takes on it."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasched.errors import ConfigError
from megasched.planner.hardware import Hardware, Link, known_hardware, load_hardware
from megasched.planner.work import Work

NODE, NETWORK = Link(100.0, 1.0, 0.0), Link(10.0, 1.0, 0.0)
GPU = Hardware("test", 10.0, 1.0, 100.0, 50.0, 4, (128, 128), 0.5, 0.25, 1000.0, 0.5, 8, NODE, NETWORK)


@pytest.mark.parametrize("name", known_hardware())
def test_what_comes_with_megasched_is_complete(name):
    found = load_hardware(name)
    assert found.gpus_per_node == 8
    assert 0 < found.product_efficiency < 1
    assert found.usable_bytes > 60e9


def product(m, n, k, count=1):
    work = Work()
    work.products[1, m, n, k] = count
    return work


def test_a_product_takes_whole_waves_of_tiles():
    peak = 100e12 * 0.5
    assert GPU.compute_seconds(product(256, 256, 1000), 2) == pytest.approx(2 * 256 * 256 * 1000 / peak)
    # One more row is one more wave of 4 tiles.
    assert GPU.compute_seconds(product(257, 256, 1000), 2) == pytest.approx(2 * 512 * 256 * 1000 / peak)
    assert GPU.compute_seconds(product(256, 256, 1000, 3), 4) == pytest.approx(6 * 2 * 256 * 256 * 1000 / peak)


def test_attention_and_traffic_have_speeds_of_their_own():
    assert GPU.compute_seconds(Work(attention=1e12), 2) == pytest.approx(1e12 / 25e12)
    assert GPU.compute_seconds(Work(traffic=1e9), 2) == pytest.approx(1e9 / 500e9)


@pytest.mark.parametrize(("span", "speed"), [(8, 100e9), (16, 10e9)])
def test_a_group_is_as_fast_as_the_slowest_link_in_it(span, speed):
    work = Work()
    work.sent["allreduce", "G"], work.sent["allgather_base", "G"] = 800, 800
    work.calls["allreduce", "G"] = work.calls["allgather_base", "G"] = 1
    assert GPU.send_seconds(work, {"G": (4, span)}) == pytest.approx((2 + 1) * 800 * 3 / 4 / speed)
    assert GPU.send_seconds(work, {"G": (1, 1)}) == 0


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 4000))
def test_no_product_is_faster_than_the_peak(m, n, k):
    assert GPU.compute_seconds(product(m, n, k), 2) >= 2 * m * n * k / (100e12 * 0.5)


def written(tmp_path, change):
    text = (  # as a user would write it
        'name = "mine"\nmemory_gib = 80\nreserved_gib = 4\nbf16_tflops = 900\nfp32_tflops = 400\n'
        "multiprocessors = 132\ntile = [128, 256]\nproduct_efficiency = 0.7\nattention_efficiency = 0.5\n"
        "memory_gbytes_per_s = 3000\nmemory_efficiency = 0.8\n"
        "[node]\ngpus = 4\ngbytes_per_s = 400\nefficiency = 0.8\nlatency_us = 5\n"
        "[network]\ngbytes_per_s = 50\nefficiency = 0.8\nlatency_us = 20\n"
    )
    path = tmp_path / "mine.toml"
    path.write_text(change(text))
    return str(path)


def test_a_file_of_the_user(tmp_path):
    found = load_hardware(written(tmp_path, lambda text: text))
    assert (found.name, found.gpus_per_node, found.link(4).gbytes_per_s) == ("mine", 4, 400)
    assert dataclasses.asdict(found)["tile"] == (128, 256)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("memory_gib = 80\n", ""), "lacks memory_gib"),
        (lambda text: "colour = 3\n" + text, "has unknown colour"),
        (
            lambda text: text.replace("efficiency = 0.8\nlatency_us = 5", "latency_us = 5"),
            r"\[node\] lacks efficiency",
        ),
        (lambda text: text.replace("= 900", "= -1"), "bf16_tflops is -1; it must be a number above 0"),
        (lambda text: text.replace("= 900", "= ["), "mine.toml: "),
    ],
)
def test_a_file_that_can_not_be_used_says_why(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        load_hardware(written(tmp_path, change))


def test_a_type_that_is_not_known():
    with pytest.raises(ConfigError, match="known are a100-80gb, h100-80gb"):
        load_hardware("tpu")
    with pytest.raises(ConfigError, match="no such file"):
        load_hardware("mine.toml")
