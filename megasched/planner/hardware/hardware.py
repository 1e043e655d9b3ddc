"""Describes a GPU and the cluster around it, as a TOML file tells them, and computes how long work takes there."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasched.errors import ConfigError
from megasched.reading.files import MIB, Expected
from megasched.reading.toml_file import read_toml

if TYPE_CHECKING:  # it takes torch, and who asks what a GPU has does not
    from megasched.planner.measure.work import Product, Work

GIB = 1 << 30
HARDWARE = Expected(
    "a GPU and the cluster around it, in TOML like those of megasched/planner/gpus", flag="--gpu", most=MIB
)
_LINK = {"gpus?": int, "gbytes_per_s?": float, "efficiency?": float, "latency_us?": float}
_FORM = {"name?": str, "tile?": [int], "node?": _LINK, "network?": _LINK}
MOST = 1e15  # of any figure
# Bytes that a rank sends of a tensor, in parts of it; n ranks (ring algorithms).
_SENT = {"allreduce": 2.0}


@dataclass(frozen=True)
class Link:
    """Describes how ranks reach each other.

    Attributes:
        gbytes_per_s: peak of one GPU in one direction.
        efficiency: part of the peak that large messages reach.
        latency_us: latency of one operation in microseconds.
    """

    gbytes_per_s: float
    efficiency: float
    latency_us: float

    def seconds(self, sent: float) -> float:
        """Returns the seconds of one operation in which each rank sends ``sent`` bytes."""
        return sent / (self.gbytes_per_s * 1e9 * self.efficiency) + self.latency_us * 1e-6


@dataclass(frozen=True)
class Group:
    """Describes ranks that communicate: their number, and that of the consecutive ones among which they lie."""

    ranks: int
    span: int


@dataclass(frozen=True)
class Hardware:
    """Describes a GPU and its cluster; see ``gpus/h100-80gb.toml`` for what the fields mean."""

    name: str
    memory_gib: float
    reserved_gib: float
    bf16_tflops: float
    fp32_tflops: float
    multiprocessors: int
    tile: tuple[int, int]
    product_efficiency: float
    attention_efficiency: float
    memory_gbytes_per_s: float
    memory_efficiency: float
    kernel_us: float
    gpus_per_node: int
    node: Link
    network: Link
    fp8_tflops: float | None = None
    fp8_efficiency: float | None = None

    @property
    def usable_bytes(self) -> float:
        """Returns the bytes of memory for tensors."""
        return (self.memory_gib - self.reserved_gib) * GIB

    def link(self, span: int) -> Link:
        """Returns the link between ranks that lie within ``span`` consecutive ranks."""
        return self.node if span <= self.gpus_per_node else self.network

    def peak(self, itemsize: int) -> float:
        """Returns the peak FLOP/s of matrix products with elements of ``itemsize`` bytes."""
        tflops = {1: self.fp8_tflops, 2: self.bf16_tflops}.get(itemsize, self.fp32_tflops)
        assert tflops is not None, f"{self.name} has no 8-bit products"
        return tflops * 1e12

    def product_seconds(self, work: Work) -> float:
        """Returns the seconds of the matrix products."""
        return sum(count * self._product(shape) for shape, count in work.products.items())

    def other_seconds(self, work: Work, itemsize: int) -> float:
        """Returns the seconds of attention, of memory-bound operations, and of each kernel's start and end."""
        attention = work.attention / (self.peak(itemsize) * self.attention_efficiency)
        return attention + self.traffic_seconds(work.traffic) + work.kernels * self.kernel_us * 1e-6

    def traffic_seconds(self, count: float) -> float:
        """Returns the seconds to read and write ``count`` bytes of memory."""
        return count / (self.memory_gbytes_per_s * 1e9 * self.memory_efficiency)

    def _product(self, product: Product) -> float:
        """Returns the seconds of one matrix product.

        A partial wave of tiles takes as long as a full one, a flat product waits for memory, and the result is
        written once it is computed.
        """
        rows, columns = (
            math.ceil(size / part) for size, part in zip((product.m, product.n), self.tile, strict=True)
        )
        waves = math.ceil(product.batch * rows * columns / self.multiprocessors)
        padded = waves * self.multiprocessors * math.prod(self.tile)
        efficiency = (product.itemsize == 1 and self.fp8_efficiency) or self.product_efficiency
        computed = 2.0 * padded * product.k / (self.peak(product.itemsize) * efficiency)
        return max(computed, self.traffic_seconds(product.read)) + self.traffic_seconds(product.written)

    def collective_seconds(self, operation: str, size: int, group: Group) -> float:
        """Returns the seconds of one collective operation.

        Args:
            size: bytes of the whole tensor, gathered or before it is reduced.
        """
        sent = _SENT.get(operation, 1.0) * size * (group.ranks - 1) / group.ranks
        return self.link(group.span).seconds(sent)

    def send_seconds(self, work: Work, groups: Mapping[str, Group], overlapped: str = "") -> tuple[float, float]:
        """Returns the seconds of collective operations that stand alone, and of those that overlap with products.

        Args:
            groups: the groups of ranks by name.
            overlapped: name of a group whose operations are cut in pieces, one for each rank, all but one of which
                overlap (``--tp-comm-overlap``).
        """
        alone = behind = 0.0
        for one, calls in work.sent.items():
            group = groups.get(one.group)
            if group is None or group.ranks == 1:
                continue
            seconds = calls * self.collective_seconds(one.operation, one.bytes, group)
            share = 0.0 if one.behind else 1 / group.ranks if one.group == overlapped else 1.0
            alone += share * seconds
            behind += (1 - share) * seconds
        return alone, behind


def known_hardware() -> list[str]:
    """Returns the names that ``load_hardware`` knows without a file."""
    folder = files("megasched.planner.hardware") / "gpus"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_hardware(name: str) -> Hardware:
    """Loads a GPU type that comes with megasched, or a TOML file.

    Raises:
        ConfigError: there is none, or something is missing or wrong in it.
    """
    if name.endswith(".toml"):
        path: Any = Path(name)
        if not os.path.lexists(path):
            raise ConfigError(f"--gpu {name}: no such file")
    elif name in known_hardware():
        path = files("megasched.planner.hardware") / "gpus" / f"{name}.toml"
    else:
        raise ConfigError(f"--gpu {name}: known are {', '.join(known_hardware())}; or name a TOML file")
    return _read(read_toml(path, HARDWARE, _FORM), name)


def _read(found: dict[str, Any], name: str) -> Hardware:
    links = {key: dict(found.pop(key, {})) for key in ("node", "network")}
    found["gpus_per_node"] = links["node"].pop("gpus", None)
    for key, link in links.items():
        _check(link, Link, f"--gpu {name}: [{key}]")
        found[key] = Link(**link)
    _check(found, Hardware, f"--gpu {name}")
    if len(found["tile"]) != 2 or not all(0 < size < MOST for size in found["tile"]):
        raise ConfigError(f"--gpu {name}: tile is {found['tile']!r:.60}; it must be two whole numbers above 0")
    found["tile"] = tuple(found["tile"])
    return Hardware(**found)


def _check(found: Mapping[str, Any], kind: type, where: str) -> None:
    names = {field.name for field in fields(kind)}
    needed = {field.name for field in fields(kind) if field.default is MISSING}
    missing = sorted(needed - {key for key, value in found.items() if value is not None})
    if missing or found.keys() - names:
        unknown = sorted(found.keys() - names)
        parts = [
            f"{label} {', '.join(which)}"
            for label, which in (("lacks", missing), ("has unknown", unknown))
            if which
        ]
        raise ConfigError(f"{where} {' and '.join(parts)}")
    for key, value in found.items():
        numeric = isinstance(value, int | float) and not isinstance(value, bool) and value < MOST
        if key not in ("name", "tile", "node", "network") and not (numeric and value > 0):
            raise ConfigError(f"{where}: {key} is {value!r}; it must be a number above 0 and below {MOST:.0e}")
