"""Calibration of one GPU, with planted seconds: the figures that give them come out, whatever the base says."""

import dataclasses
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megasched.errors import ConfigError
from megasched.planner.hardware import calibrate
from megasched.planner.hardware.calibrate import (
    CudaTimer,
    Gpu,
    Sizes,
    believable,
    efficiency_for,
    matching_type,
    measure_gpu,
    read_gpu,
    significant,
)
from megasched.planner.hardware.hardware import GIB, load_hardware
from megasched.planner.measure.work import CountWork, Product, Work

CPU = torch.device("cpu")
SIZES = Sizes(
    products=((64, 32, 48), (32, 32, 64), (48, 64, 32)),
    attention=(1, 2, 32, 16),
    copied=4 << 20,
    kernels=5,
    message=(4 << 20, 64),
)
# So deep that no product waits for memory.
DEEP = dataclasses.replace(SIZES, products=((512, 256, 40000), (256, 256, 80000), (1024, 256, 40000)))
H100 = load_hardware("h100-80gb")
GPU = Gpu("Test 80GB", 79.5, 120, fp8=True)
TRUTH = dataclasses.replace(
    H100,
    name=GPU.name,
    memory_gib=GPU.memory_gib,
    multiprocessors=GPU.multiprocessors,
    memory_efficiency=0.9,
    kernel_us=1.75,
    product_efficiency=0.6125,
    fp8_efficiency=0.5,
    attention_efficiency=0.4321,
)


def products(sizes, itemsize):
    """Work of each product that is timed."""
    return [Work(products=Counter({Product(1, *shape, itemsize, 2): 1})) for shape in sizes.products]


def planted(truth, sizes, fp8=True):
    """Seconds that a GPU takes for which ``truth`` is right, in the order in which they are asked for."""
    yield truth.traffic_seconds(2 * sizes.copied)
    yield truth.other_seconds(Work(kernels=sizes.kernels), 2)
    yield from (truth.product_seconds(work) for work in products(sizes, 2))
    yield from (truth.product_seconds(work) for work in products(sizes, 1) if fp8)
    batch, heads, tokens, width = sizes.attention
    yield truth.other_seconds(Work(attention=14 * batch * heads * tokens * (tokens + 1) / 2 * width), 2)


def replay(seconds):
    """A timer that runs nothing."""
    left = iter(seconds)
    return lambda run: next(left)


def wall_clock(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@pytest.fixture
def no_tensors(monkeypatch):
    """What is timed by ``replay`` is never run, and need not be there."""
    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape, **options: randn(1, **options))


def test_planted_seconds_give_the_planted_figures():
    steps = []
    found = measure_gpu(H100, GPU, CPU, replay(planted(TRUTH, SIZES)), SIZES, steps.append)
    assert dataclasses.replace(H100, **found) == TRUTH
    assert steps == [
        *("memory_efficiency", "kernel_us", "product_efficiency", "fp8_efficiency", "attention_efficiency")
    ]


@pytest.mark.usefixtures("no_tensors")
def test_products_read_and_write_with_the_memory_that_was_measured():
    found = calibrate.product_efficiency(
        dataclasses.replace(TRUTH, product_efficiency=0.1),
        CPU,
        replay(TRUTH.product_seconds(work) for work in products(DEEP, 2)),
        DEEP,
    )
    assert found == pytest.approx(0.6125, rel=1e-12)


@given(st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3))
def test_the_median_over_shapes(efficiencies):
    hardware = dataclasses.replace(TRUTH, memory_gbytes_per_s=1e12)
    each = [dataclasses.replace(hardware, product_efficiency=value) for value in efficiencies]
    seconds = [one.product_seconds(work) for one, work in zip(each, products(SIZES, 2), strict=True)]
    found = calibrate.product_efficiency(hardware, CPU, replay(seconds), SIZES)
    assert found == pytest.approx(sorted(efficiencies)[1], rel=1e-9)


@given(st.floats(1e-6, 1.0), st.floats(1e-12, 1e12))
def test_a_formula_is_turned_round(efficiency, work):
    assert efficiency_for(lambda value: work / value, work / efficiency) == pytest.approx(efficiency, rel=1e-12)


def test_on_a_real_device_every_step_runs():
    """Not planted: this processor, by the clock. It is a poor H100, and has all that is run there."""
    found = measure_gpu(H100, GPU, CPU, wall_clock, SIZES)
    assert set(found) == {
        *("name", "memory_gib", "multiprocessors", "memory_efficiency", "kernel_us"),
        *("product_efficiency", "fp8_efficiency", "attention_efficiency"),
    }
    assert all(0 < found[name] < 1 for name in found if name.endswith("efficiency"))


def test_what_is_timed_is_what_a_plan_counts():
    """The same work, by the counter of plans; that of attention is there by its own name on a CPU."""
    counted = []

    def count(run):
        with CountWork() as counter:
            run()
        counted.append(counter.work)
        return 1.0

    measure_gpu(H100, dataclasses.replace(GPU, fp8=False), CPU, count, SIZES)
    copied, tiny, *multiplied, attended = counted
    assert copied.traffic >= 2 * SIZES.copied
    assert tiny.kernels == SIZES.kernels
    assert [work.products for work in multiplied] == [work.products for work in products(SIZES, 2)]
    batch, heads, tokens, width = SIZES.attention
    assert attended.attention == 14 * batch * heads * tokens * (tokens + 1) / 2 * width


def test_without_8_bits():
    none = {"fp8_tflops": None, "fp8_efficiency": None}
    without = Gpu("Test", 79.0, 108, fp8=False)
    found = measure_gpu(H100, without, CPU, lambda run: 1.0, SIZES)
    assert found.items() >= none.items()
    a100 = load_hardware("a100-80gb")
    assert "fp8_efficiency" not in measure_gpu(a100, GPU, CPU, lambda run: 1.0, SIZES)


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (
            2.0,
            "memory_efficiency came out as 1.80, and nothing is faster than its peak: memory_gbytes_per_s = 3350",
        ),
        (1e9, "memory_efficiency came out as more than 8"),
    ],
)
def test_faster_than_the_peak_is_an_error_that_teaches(factor, words):
    seconds = [TRUTH.traffic_seconds(2 * SIZES.copied) / factor]
    with pytest.raises(ConfigError, match=words) as error:
        measure_gpu(H100, GPU, CPU, replay(seconds), SIZES)
    assert "--gpu TYPE" in str(error.value)


@pytest.mark.parametrize(
    ("measure", "peak"),
    [("product", "bf16_tflops = 989.0"), ("fp8", "fp8_tflops = 1979.0"), ("attention", "bf16_tflops = 989.0")],
)
def test_the_error_names_the_peak(measure, peak):
    with pytest.raises(ConfigError, match=f"{measure}_efficiency came out as more than 8.*{peak}"):
        getattr(calibrate, f"{measure}_efficiency")(H100, CPU, lambda run: 0.0, SIZES)


def test_the_peak_itself_is_no_error():
    assert believable(1.0, "x", "y") == 1.0
    assert (significant(0.612345), significant(1.0), significant(123456.0)) == (0.6123, 1.0, 123500.0)


# ---- the device ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "memory", "wanted"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "h100-80gb"),
        ("NVIDIA H100 80GB HBM3", 79.6, "h100-80gb"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "a100-80gb"),
        ("NVIDIA H200", 139.8, "h200-141gb"),
        ("NVIDIA B200", 178.4, "b200-180gb"),
        ("NVIDIA GB200", 184.3, "gb200-186gb"),
        ("NVIDIA H100 PCIe", 79.1, None),
        ("NVIDIA H100 NVL", 93.1, None),
        ("NVIDIA H200 NVL", 139.8, None),
        ("NVIDIA GH200 480GB", 94.5, None),
        ("NVIDIA A100-SXM4-40GB", 39.4, None),
        ("NVIDIA A100 80GB PCIe", 79.3, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.8, None),
        ("NVIDIA GeForce RTX 4090", 23.6, None),
    ],
)
def test_the_type_of_a_gpu(name, memory, wanted):
    gpu = Gpu(name, memory, 132, fp8=True)
    if wanted is not None:
        assert matching_type(gpu) == wanted
        return
    with pytest.raises(ConfigError, match="by --gpu TYPE") as error:
        matching_type(gpu)
    assert name in str(error.value)


@pytest.mark.parametrize(("capability", "fp8"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_what_a_device_says(monkeypatch, capability, fp8):
    said = SimpleNamespace(name="NVIDIA X", total_memory=int(79.12 * GIB), multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: said)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert read_gpu(torch.device("cuda", 0)) == Gpu("NVIDIA X", 79.1, 132, fp8, in_node=4)


def test_the_timer_leaves_out_warm_up_and_head_start(monkeypatch):
    clock, ran = [0.0], []  # milliseconds

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = clock[0]

        def elapsed_time(self, end):
            return end.at - self.at

    def run():
        ran.append(None)
        clock[0] += 50 if len(ran) <= 3 else 2 if len(ran) % 4 else 9  # one in four is disturbed

    def head_start(cycles):
        clock[0] += 10

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", head_start)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert CudaTimer(warm_up=3, repeats=9)(run) == pytest.approx(2e-3)
    assert len(ran) == 12


def test_tiny_kernels_fit_in_the_queue_of_a_gpu():
    assert CudaTimer().repeats * (Sizes().kernels + 1) < 1024
