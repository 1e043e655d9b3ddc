"""A GPU and the cluster around it, as a TOML file tells them, and how long work takes there."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from megasched.errors import ConfigError
from megasched.planner.work import Work

GIB = 1 << 30
# Bytes that a rank sends of a tensor, in parts of it; n ranks (ring algorithms).
_SENT = {"allreduce": 2.0}


@dataclass(frozen=True)
class Link:
    """How ranks reach each other.

    Attributes:
        gbytes_per_s: of one GPU in one direction, at best.
        efficiency: what large messages reach of it.
        latency_us: of one operation.
    """

    gbytes_per_s: float
    efficiency: float
    latency_us: float

    def seconds(self, sent: float, calls: float = 1.0) -> float:
        """To send so many bytes from each rank."""
        return sent / (self.gbytes_per_s * 1e9 * self.efficiency) + calls * self.latency_us * 1e-6


@dataclass(frozen=True)
class Hardware:
    """See ``gpus/h100-80gb.toml`` for what the fields mean."""

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
    gpus_per_node: int
    node: Link
    network: Link

    @property
    def usable_bytes(self) -> float:
        """For tensors."""
        return (self.memory_gib - self.reserved_gib) * GIB

    def link(self, span: int) -> Link:
        """Between ranks that lie in so many consecutive ones."""
        return self.node if span <= self.gpus_per_node else self.network

    def peak(self, itemsize: int) -> float:
        """FLOP/s of matrix products."""
        return (self.bf16_tflops if itemsize == 2 else self.fp32_tflops) * 1e12

    def compute_seconds(self, work: Work, itemsize: int) -> float:
        """Of all that is not sent: products, attention, and what is bound by memory, one after the other."""
        peak = self.peak(itemsize)
        products = sum(count * self._product(shape, peak) for shape, count in work.products.items())
        return products + work.attention / (peak * self.attention_efficiency) + self.traffic_seconds(work.traffic)

    def traffic_seconds(self, count: float) -> float:
        """To read and write so many bytes of memory."""
        return count / (self.memory_gbytes_per_s * 1e9 * self.memory_efficiency)

    def _product(self, shape: tuple[int, int, int, int], peak: float) -> float:
        """Of one matrix product: a wave of tiles takes as long as a full one."""
        batch, m, n, k = shape
        tiles = batch * math.ceil(m / self.tile[0]) * math.ceil(n / self.tile[1])
        waves = math.ceil(tiles / self.multiprocessors)
        padded = waves * self.multiprocessors * self.tile[0] * self.tile[1]
        return 2.0 * padded * k / (peak * self.product_efficiency)

    def send_seconds(self, work: Work, groups: Mapping[str, tuple[int, int]]) -> float:
        """Of collective operations, none of them hidden behind anything.

        Args:
            groups: name -> (ranks, consecutive ranks among which they lie).
        """
        total = 0.0
        for (operation, name), size in work.sent.items():
            ranks, span = groups.get(name, (1, 1))
            if ranks > 1:
                sent = _SENT.get(operation, 1.0) * size * (ranks - 1) / ranks
                total += self.link(span).seconds(sent, work.calls[operation, name])
        return total


def known_hardware() -> list[str]:
    """Names that ``load_hardware`` knows without a file."""
    folder = files("megasched.planner") / "gpus"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_hardware(name: str) -> Hardware:
    """A GPU type that comes with megasched, or a TOML file.

    Raises:
        ConfigError: there is none, or something is missing or wrong in it.
    """
    if name.endswith(".toml"):
        path: Any = Path(name)
        if not path.is_file():
            raise ConfigError(f"--gpu {name}: no such file")
    elif name in known_hardware():
        path = files("megasched.planner") / "gpus" / f"{name}.toml"
    else:
        raise ConfigError(f"--gpu {name}: known are {', '.join(known_hardware())}; or name a TOML file")
    try:
        found = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--gpu {name}: {error}") from error
    return _read(found, name)


def _read(found: dict[str, Any], name: str) -> Hardware:
    links = {key: dict(found.pop(key, {})) for key in ("node", "network")}
    found["gpus_per_node"] = links["node"].pop("gpus", None)
    for key, link in links.items():
        _check(link, Link, f"--gpu {name}: [{key}]")
        found[key] = Link(**link)
    _check(found, Hardware, f"--gpu {name}")
    found["tile"] = tuple(found["tile"])
    return Hardware(**found)


def _check(found: Mapping[str, Any], kind: type, where: str) -> None:
    names = {field.name for field in fields(kind)}
    missing = sorted(names - {key for key, value in found.items() if value is not None})
    if missing or found.keys() - names:
        unknown = sorted(found.keys() - names)
        parts = [
            f"{label} {', '.join(which)}"
            for label, which in (("lacks", missing), ("has unknown", unknown))
            if which
        ]
        raise ConfigError(f"{where} {' and '.join(parts)}")
    for key, value in found.items():
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        if key not in ("name", "tile", "node", "network") and not (numeric and value > 0):
            raise ConfigError(f"{where}: {key} is {value!r}; it must be a number above 0")
