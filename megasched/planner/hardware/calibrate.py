"""Times what one GPU reaches of its peaks, and turns it into figures of ``Hardware`` by the formulas there."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from megasched.analysis.attention_flops import attended, attention_flops
from megasched.errors import ConfigError
from megasched.planner.hardware.hardware import GIB, Hardware, known_hardware, load_hardware
from megasched.planner.measure.work import Product, Work

# Runs something, and says how many seconds it takes once.
Timer = Callable[[Callable[[], object]], float]

# GPUs whose tensor cores multiply 8-bit numbers: Ada, Hopper and later.
_FP8_CAPABILITY = (8, 9)
# Some 10 ms of a GPU, in which the host gets ahead of it.
_HEAD_START_CYCLES = 20_000_000
# Efficiencies that are looked for. One above 1 is found, too, so that an error can tell it.
_LEAST, _MOST = 1e-9, 8.0
_HALVINGS = 100
# Digits of a measured figure that mean something.
_DIGITS = 4
# GPUs of the same name that share their peaks have the same memory, in GiB.
_SAME_MEMORY = 3.0
# Words of other forms of a GPU, whose peaks are lower.
_FORMS = {"PCIE", "NVL", "MIG"}


@dataclass(frozen=True)
class Sizes:
    """Holds the sizes of what is timed: by default for a GPU, small ones for tests.

    Attributes:
        products: rows, columns and depth of matrix products; the linears of models of 8 and 70 billion parameters.
        attention: batch, heads, tokens, and width of a head.
        copied: bytes of a copy; far more than a cache holds.
        kernels: tiny ones in a row. All repeats of a timer must fit in the queue of a GPU (1024 launches): else it
            waits for the host.
        message: bytes that each rank brings to a collective operation, a large one and a tiny one.
    """

    products: tuple[tuple[int, int, int], ...] = (
        (8192, 4096, 4096),
        (8192, 14336, 4096),
        (8192, 4096, 14336),
        (8192, 8192, 8192),
        (8192, 28672, 8192),
    )
    attention: tuple[int, int, int, int] = (1, 32, 8192, 128)
    copied: int = 1 << 30
    kernels: int = 24
    message: tuple[int, int] = (64 << 20, 1 << 10)


@dataclass(frozen=True)
class CudaTimer:
    """Times a run by events on the current stream: the median seconds of runs that follow without a gap."""

    warm_up: int = 30
    repeats: int = 30

    def __call__(self, run: Callable[[], object]) -> float:
        for _ in range(self.warm_up):
            run()
        torch.cuda.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(self.repeats + 1)]
        # What is timed is queued behind it, so that the time of launching from Python is in none of the gaps.
        torch.cuda._sleep(_HEAD_START_CYCLES)
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        torch.cuda.synchronize()
        passed = [first.elapsed_time(second) for first, second in pairwise(events)]
        return statistics.median(passed) * 1e-3


@dataclass(frozen=True)
class Gpu:
    """Describes what a device says about itself.

    Attributes:
        fp8: whether it multiplies 8-bit numbers.
        in_node: number of GPUs in its node.
    """

    name: str
    memory_gib: float
    multiprocessors: int
    fp8: bool
    in_node: int = 1


def read_gpu(device: torch.device) -> Gpu:
    """Reads the properties of a CUDA device."""
    found = torch.cuda.get_device_properties(device)
    fp8 = torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY
    memory = round(found.total_memory / GIB, 1)
    return Gpu(found.name, memory, found.multi_processor_count, fp8, torch.cuda.device_count())


def matching_type(gpu: Gpu) -> str:
    """Returns the known type that this GPU is of.

    Raises:
        ConfigError: no known type matches.
    """
    words = set(re.findall(r"[A-Z0-9]+", gpu.name.upper().replace("-", " ")))
    for name in known_hardware():
        known = load_hardware(name)
        same_memory = abs(known.memory_gib - gpu.memory_gib) < _SAME_MEMORY
        if known.name.split()[0].upper() in words and same_memory and not words & _FORMS:
            return name
    raise ConfigError(
        f"--calibrate: no known type is {gpu.name} with {gpu.memory_gib} GiB, and peaks can't be measured. Name "
        f"the type whose data sheet is this GPU's by --gpu TYPE ({', '.join(known_hardware())}), or a TOML file"
    )


def measure_gpu(
    base: Hardware,
    gpu: Gpu,
    device: torch.device,
    timer: Timer,
    sizes: Sizes,
    on_step: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
    """Measures the fields of ``Hardware`` that one GPU can tell, and returns them by name.

    Args:
        base: gives the peaks.
        on_step: called with a field before it is measured.

    Raises:
        ConfigError: something is faster than its peak.
    """
    found: dict[str, Any] = {
        "name": gpu.name,
        "memory_gib": gpu.memory_gib,
        "multiprocessors": gpu.multiprocessors,
    }
    if base.fp8_tflops is not None and not gpu.fp8:
        found |= {"fp8_tflops": None, "fp8_efficiency": None}
    for name, measure in _STEPS.items():
        if name == "fp8_efficiency" and replace(base, **found).fp8_tflops is None:
            continue
        on_step(name)
        found[name] = significant(measure(replace(base, **found), device, timer, sizes))
    return found


def memory_efficiency(hardware: Hardware, device: torch.device, timer: Timer, sizes: Sizes) -> float:
    """Measures the efficiency of memory by a copy, which reads and writes all of a tensor."""
    source = torch.ones(sizes.copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = timer(lambda: target.copy_(source))
    found = efficiency_for(
        lambda value: replace(hardware, memory_efficiency=value).traffic_seconds(2.0 * sizes.copied), seconds
    )
    return believable(found, "memory_efficiency", f"memory_gbytes_per_s = {hardware.memory_gbytes_per_s}")


def kernel_us(hardware: Hardware, device: torch.device, timer: Timer, sizes: Sizes) -> float:
    """Measures the microseconds of a kernel that has next to nothing to do."""
    tiny = torch.zeros(1, device=device)

    def run() -> None:
        for _ in range(sizes.kernels):
            tiny.add_(1)

    return timer(run) / sizes.kernels * 1e6


def product_efficiency(hardware: Hardware, device: torch.device, timer: Timer, sizes: Sizes) -> float:
    """Measures the efficiency of products in bf16."""

    def multiply(m: int, n: int, k: int) -> Callable[[], object]:
        left = torch.randn(m, k, dtype=torch.bfloat16, device=device)
        right = torch.randn(n, k, dtype=torch.bfloat16, device=device)
        return lambda: left @ right.t()

    found = _products(hardware, "product_efficiency", 2, multiply, timer, sizes)
    return believable(found, "product_efficiency", f"bf16_tflops = {hardware.bf16_tflops}")


def fp8_efficiency(hardware: Hardware, device: torch.device, timer: Timer, sizes: Sizes) -> float:
    """Measures the efficiency of products in 8 bits, with one scale for each tensor."""

    def multiply(m: int, n: int, k: int) -> Callable[[], object]:
        left = torch.randn(m, k, device=device).to(torch.float8_e4m3fn)
        right = torch.randn(n, k, device=device).to(torch.float8_e4m3fn)
        scale = torch.ones((), device=device)
        return lambda: torch._scaled_mm(
            left, right.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    found = _products(hardware, "fp8_efficiency", 1, multiply, timer, sizes)
    return believable(found, "fp8_efficiency", f"fp8_tflops = {hardware.fp8_tflops}")


def _products(
    hardware: Hardware,
    name: str,
    itemsize: int,
    multiply: Callable[[int, int, int], Callable[[], object]],
    timer: Timer,
    sizes: Sizes,
) -> float:
    """Returns the median over shapes of the efficiency at which the formula gives the seconds measured.

    Args:
        hardware: its ``memory_efficiency`` must be measured already, as products read and write, too.
        name: name of the efficiency.
        itemsize: bytes of an element of the factors; the result is in bf16.
        multiply: returns a function that multiplies [m, k] by [k, n], from m, n and k.
    """

    def efficiency(m: int, n: int, k: int) -> float:
        work = Work(products=Counter({Product(1, m, n, k, itemsize, 2): 1}))
        seconds = timer(multiply(m, n, k))
        return efficiency_for(lambda value: replace(hardware, **{name: value}).product_seconds(work), seconds)

    return statistics.median(efficiency(*shape) for shape in sizes.products)


def attention_efficiency(hardware: Hardware, device: torch.device, timer: Timer, sizes: Sizes) -> float:
    """Measures the efficiency of causal attention in bf16, forward and backward together."""
    batch, heads, tokens, width = sizes.attention
    query, key, value = (
        torch.randn(sizes.attention, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(3)
    )
    gradient = torch.randn_like(query)

    def run() -> None:
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(output, (query, key, value), gradient)

    pairs = batch * heads * attended(tokens, tokens, causal=True, window=None)
    work = Work(attention=sum(attention_flops(pairs, width, width, backward) for backward in (False, True)))
    found = efficiency_for(
        lambda value: replace(hardware, attention_efficiency=value).other_seconds(work, 2), timer(run)
    )
    return believable(found, "attention_efficiency", f"bf16_tflops = {hardware.bf16_tflops}")


# Memory comes first: products read and write.
_STEPS = {
    "memory_efficiency": memory_efficiency,
    "kernel_us": kernel_us,
    "product_efficiency": product_efficiency,
    "fp8_efficiency": fp8_efficiency,
    "attention_efficiency": attention_efficiency,
}


def efficiency_for(seconds_at: Callable[[float], float], measured: float) -> float:
    """Finds the efficiency at which a formula gives the seconds that were measured, by halving.

    Args:
        seconds_at: seconds at an efficiency; a higher one takes fewer.
    """
    low, high = _LEAST, _MOST
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        if seconds_at(middle) > measured:
            low = middle
        else:
            high = middle
    return high


def believable(efficiency: float, name: str, peak: str) -> float:
    """Returns the efficiency, if it can be one.

    Raises:
        ConfigError: it is above 1.
    """
    if efficiency > 1:
        shown = "more than 8" if efficiency >= _MOST else f"{efficiency:.2f}"
        raise ConfigError(
            f"--calibrate: {name} came out as {shown}, and nothing is faster than its peak: {peak} is not of this "
            "GPU's data sheet. Name a type whose it is by --gpu TYPE, or a TOML file that has it right"
        )
    return efficiency


def significant(value: float) -> float:
    """Rounds a value to the digits that mean something."""
    return float(f"{value:.{_DIGITS}g}")
