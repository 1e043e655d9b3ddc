"""Hardware as data: what is read, what is refused, and how long work takes on it."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasched.errors import ConfigError
from megasched.planner.hardware.hardware import Group, Hardware, Link, known_hardware, load_hardware
from megasched.planner.measure.work import Product, Sent, Work

NODE, NETWORK = Link(100.0, 1.0, 0.0), Link(10.0, 1.0, 0.0)
GPU = Hardware(
    name="test",
    memory_gib=10.0,
    reserved_gib=1.0,
    bf16_tflops=100.0,
    fp32_tflops=50.0,
    fp8_tflops=200.0,
    fp8_efficiency=0.25,
    multiprocessors=4,
    tile=(128, 128),
    product_efficiency=0.5,
    attention_efficiency=0.25,
    memory_gbytes_per_s=1000.0,
    memory_efficiency=0.5,
    kernel_us=3.0,
    gpus_per_node=8,
    node=NODE,
    network=NETWORK,
)


@pytest.mark.parametrize("name", known_hardware())
def test_what_comes_with_megasched_is_complete(name):
    found = load_hardware(name)
    assert found.gpus_per_node == (64 if name.startswith("gb200") else 8)
    assert 0 < found.product_efficiency < 1
    assert found.usable_bytes > 60e9


def product(m, n, k, itemsize=2, result_itemsize=2, count=1):
    work = Work()
    work.products[Product(1, m, n, k, itemsize, result_itemsize)] = count
    return work


def result(m, n, itemsize=2):
    """Seconds to write it."""
    return m * n * itemsize / 500e9


def test_a_product_takes_whole_waves_of_tiles():
    peak = 100e12 * 0.5
    one = 2 * 256 * 256 * 10000 / peak
    assert GPU.product_seconds(product(256, 256, 10000)) == pytest.approx(one + result(256, 256))
    # One more row is one more wave of 4 tiles.
    assert GPU.product_seconds(product(257, 256, 10000)) == pytest.approx(2 * one + result(257, 256))
    three = GPU.product_seconds(product(256, 256, 10000, itemsize=4, result_itemsize=4, count=3))
    assert three == pytest.approx(3 * (2 * one + result(256, 256, 4)))


def test_8_bits_have_a_peak_of_their_own():
    wanted = 2 * 256 * 256 * 100000 / (200e12 * 0.25) + result(256, 256)
    assert GPU.product_seconds(product(256, 256, 100000, itemsize=1)) == pytest.approx(wanted)


def test_small_products_wait_for_memory():
    work = Work()
    work.products[Product(4, 128, 128, 4096, 2, 2)] = 1
    assert GPU.product_seconds(work) == pytest.approx(4 * (256 * 4096 * 2 / 500e9 + result(128, 128)))


def test_attention_traffic_and_starts_have_speeds_of_their_own():
    assert GPU.other_seconds(Work(attention=1e12), 2) == pytest.approx(1e12 / 25e12)
    assert GPU.other_seconds(Work(traffic=1e9), 2) == pytest.approx(1e9 / 500e9)
    assert GPU.other_seconds(Work(kernels=2), 2) == pytest.approx(6e-6)


def sent(behind=False):
    work = Work()
    for operation in ("allreduce", "allgather_base"):
        work.sent[Sent(operation, "G", behind, 400, 2)] = 1
    return work


@pytest.mark.parametrize(("span", "speed"), [(8, 100e9), (16, 10e9)])
def test_a_group_is_as_fast_as_the_slowest_link_in_it(span, speed):
    whole = pytest.approx((2 + 1) * 800 * 3 / 4 / speed)
    assert GPU.send_seconds(sent(), {"G": Group(4, span)}) == (whole, 0)
    assert GPU.send_seconds(sent(behind=True), {"G": Group(4, span)}) == (0, whole)
    assert GPU.send_seconds(sent(), {"G": Group(1, 1)}) == (0, 0)
    assert GPU.send_seconds(sent(), {}) == (0, 0)


def test_of_what_overlaps_in_pieces_one_piece_stands_alone():
    alone, _ = GPU.send_seconds(sent(), {"G": Group(4, 8)})
    assert GPU.send_seconds(sent(), {"G": Group(4, 8)}, "G") == pytest.approx((alone / 4, alone * 3 / 4))


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 4000))
def test_no_product_is_faster_than_the_peak(m, n, k):
    assert GPU.product_seconds(product(m, n, k)) >= 2 * m * n * k / (100e12 * 0.5)


def written(tmp_path, change):
    text = (  # as a user would write it
        'name = "mine"\nmemory_gib = 80\nreserved_gib = 4\nbf16_tflops = 900\nfp32_tflops = 400\n'
        "multiprocessors = 132\ntile = [128, 256]\nproduct_efficiency = 0.7\nattention_efficiency = 0.5\n"
        "memory_gbytes_per_s = 3000\nmemory_efficiency = 0.8\nkernel_us = 2\n"
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
    with pytest.raises(ConfigError, match="known are a100-80gb, b200-180gb, gb200-186gb, h100-80gb"):
        load_hardware("tpu")
    with pytest.raises(ConfigError, match="no such file"):
        load_hardware("mine.toml")
