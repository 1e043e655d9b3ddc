"""Calibrates a machine for ``megasched plan --calibrate``: picks GPU and ranks, writes file and table."""

from __future__ import annotations

import datetime
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from megasched.cli.output import report_console
from megasched.errors import ConfigError
from megasched.files import check_writable, write_whole
from megasched.json_output import print_json
from megasched.planner.hardware.calibrate import CudaTimer, Gpu, Sizes, Timer, matching_type, measure_gpu, read_gpu
from megasched.planner.hardware.calibrate_links import World, measure_links, read_world, slowest
from megasched.planner.hardware.hardware import Hardware, load_hardware
from megasched.planner.hardware.hardware_file import hardware_text
from megasched.printing.console import plain_console


@dataclass(frozen=True)
class Calibration:
    """Holds the measured figures of a machine, beside those of a known type.

    Attributes:
        base: the type or file that gives the figures that were not measured.
        before: the figures of the base.
        hardware: the figures of this machine.
        measured: names of the measured figures, as in the file (``node.efficiency``).
    """

    base: str
    before: Hardware
    hardware: Hardware
    measured: frozenset[str]


def calibrate_command(path: Path, gpu: str | None, *, as_json: bool) -> None:
    """Measures this machine, writes the file and prints the figures; of several ranks, rank 0 writes and prints.

    Args:
        path: path of the TOML file, which is replaced if it exists.
        gpu: a known type or a TOML file, for the peaks; None for the type of this GPU.

    Raises:
        ConfigError: there is no GPU, a measurement is faster than its peak, or a file can't be used.
    """
    check_path(path)
    world = read_world(os.environ)
    device = own_gpu(world)
    found_gpu = read_gpu(device)
    base = gpu or matching_type(found_gpu)
    with _joined(world, device), _progress(world) as on_step, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = calibrate(base, found_gpu, world, device, CudaTimer(), Sizes(), on_step)
    if world.rank == 0:
        write_calibration(found, path, world)
        _print(found, path, as_json)


def check_path(path: Path) -> None:
    """Checks the name and the folder of the file, before anything is measured.

    Raises:
        ConfigError: the folder is missing, or the name does not end in ``.toml``, by which ``--gpu`` knows a file.
    """
    if path.suffix != ".toml":
        raise ConfigError(f"--calibrate {path}: the name must end in .toml, by which --gpu knows a file")
    check_writable("--calibrate", path)


def own_gpu(world: World) -> torch.device:
    """Makes the GPU of this process the current one, and returns it.

    Raises:
        ConfigError: there is no GPU for it.
    """
    if not torch.cuda.is_available():
        raise ConfigError("--calibrate measures a GPU, and there is none here")
    if world.local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"--calibrate: {world.local_size} ranks on this node, and {torch.cuda.device_count()} GPUs: each rank "
            "needs one of its own"
        )
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    return device


def calibrate(
    base: str,
    gpu: Gpu,
    world: World,
    device: torch.device,
    timer: Timer,
    sizes: Sizes,
    on_step: Callable[[str], None] = lambda name: None,
) -> Calibration:
    """Measures the machine; all ranks must call it, in a process group if there are several.

    Args:
        base: a known type or a TOML file, for the figures that are not measured.
        on_step: called with the name of each measurement before it begins.

    Raises:
        ConfigError: a measurement is faster than its peak, or there is no such type.
    """
    before = load_hardware(base)
    if world.size > 1:
        timer = slowest(timer, device)
    found: dict[str, Any] = measure_gpu(before, gpu, device, timer, sizes, on_step)
    measured = set(found)
    if world.local_size > 1:
        found["gpus_per_node"] = gpu.in_node
        measured.add("node.gpus")
    links = measure_links(replace(before, **found), world, device, timer, sizes, on_step)
    measured |= {f"{name}.{figure}" for name in links for figure in ("efficiency", "latency_us")}
    return Calibration(base, before, replace(before, **found, **links), frozenset(measured))


def write_calibration(found: Calibration, path: Path, world: World) -> None:
    """Writes the TOML file that ``--gpu`` reads.

    Raises:
        ConfigError: the file can't be written; an earlier one stays.
    """
    text = hardware_text(found.hardware, found.measured, found.base, _head(found, world))
    try:
        write_whole(path, [text])
    except OSError as error:
        raise ConfigError(f"--calibrate {path}: it can't be written: {error.strerror}") from error


def _head(found: Calibration, world: World) -> list[str]:
    ranks = "1 process" if world.size == 1 else f"{world.size} ranks, {world.local_size} on a node"
    head = [
        f"By megasched plan --calibrate, {datetime.date.today()}, torch {torch.__version__}, {ranks}.",
        f'What says "measured" was measured then, on this machine; all else is what --gpu {found.base} says.',
    ]
    missing = [f"[{name}]" for name in ("node", "network") if f"{name}.efficiency" not in found.measured]
    if missing:
        head.append(f"Not measured: {' and '.join(missing)}; it takes torchrun, and ranks with it between them.")
    return head


@contextmanager
def _joined(world: World, device: torch.device) -> Iterator[None]:
    """Runs its body in a process group of all ranks, where there are several."""
    if world.size == 1:
        yield
        return
    torch.distributed.init_process_group("nccl", device_id=device)
    yield
    # After an error it would wait for ranks that have none.
    torch.distributed.destroy_process_group()


@contextmanager
def _progress(world: World) -> Iterator[Callable[[str], None]]:
    if world.rank != 0:
        yield lambda name: None
        return
    with plain_console(stderr=True).status("measuring") as status:
        yield lambda name: status.update(f"measuring {name}")


def _print(found: Calibration, path: Path, as_json: bool) -> None:
    if as_json:
        figures = {"hardware": asdict(found.hardware), "measured": sorted(found.measured), "base": found.base}
        print_json({"file": str(path), **figures})
    else:
        print_calibration(found)
    print(f"wrote {path}", file=sys.stderr)


def print_calibration(found: Calibration) -> None:
    """Prints the measured figures, beside those of the base."""
    table = Table(box=None, pad_edge=False)
    for heading in (found.hardware.name, "measured", found.base):
        table.add_column(Text(heading), justify="left" if heading == found.hardware.name else "right")
    for name in sorted(found.measured - {"name"}):
        here, there = figure(found.hardware, name), figure(found.before, name)
        table.add_row(name, *("none" if value is None else f"{value:g}" for value in (here, there)))
    report_console().print(table)


def figure(hardware: Hardware, name: str) -> Any:
    """Returns a figure of the hardware by its name in the file."""
    if name == "node.gpus":
        return hardware.gpus_per_node
    link, _, key = name.rpartition(".")
    return getattr(getattr(hardware, link) if link else hardware, key)
