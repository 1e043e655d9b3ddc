"""Times collective operations, and turns what the links between GPUs reach of their peaks into a ``Link``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from megasched.errors import ConfigError
from megasched.planner.hardware.calibrate import Sizes, Timer, believable, efficiency_for, significant
from megasched.planner.hardware.hardware import Group, Hardware, Link
from megasched.planner.measure.work import Sent, Work

# An operation takes this long at least, in microseconds; noise may make a fit say less.
_LEAST_LATENCY = 0.1
_GROUP = "calibrated"
_OPERATIONS = ("allgather_base", "reduce_scatter_base")


@dataclass(frozen=True)
class World:
    """Describes the processes that measure together, one a GPU, as torchrun starts them.

    Attributes:
        rank: rank of this process.
        size: number of all processes.
        local_rank: rank of this process in its node.
        local_size: number of processes of a node.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def read_world(environment: Mapping[str, str]) -> World:
    """Reads the world from torchrun's variables; it is one process without them.

    Raises:
        ConfigError: nodes with different numbers of ranks.
    """
    names = ("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)
    found = World(*(int(environment.get(name, default)) for name, default in names))
    if found.size % found.local_size:
        raise ConfigError(
            f"--calibrate: {found.size} ranks, {found.local_size} of them on this node: start as many on each node"
        )
    return found


def link_groups(world: World) -> dict[str, list[list[int]]]:
    """Maps each link that can be measured to the groups of ranks that reach each other by it.

    All groups of a link are busy at a time, as they are in training.
    """
    found = {
        "node": [list(range(first, first + world.local_size)) for first in range(0, world.size, world.local_size)],
        "network": [list(range(first, world.size, world.local_size)) for first in range(world.local_size)],
    }
    return {name: groups for name, groups in found.items() if len(groups[0]) > 1}


def slowest(timer: Timer, device: torch.device) -> Timer:
    """Returns a timer of the slowest rank's seconds, for which a step waits; all ranks find the same figures."""

    def time(run: Callable[[], object]) -> float:
        seconds = torch.tensor(timer(run), dtype=torch.float64, device=device)
        torch.distributed.all_reduce(seconds, op=torch.distributed.ReduceOp.MAX)
        return seconds.item()

    return time


def measure_links(
    hardware: Hardware,
    world: World,
    device: torch.device,
    timer: Timer,
    sizes: Sizes,
    on_step: Callable[[str], None] = lambda name: None,
) -> dict[str, Link]:
    """Measures ``node`` and ``network`` as far as these ranks use them; must be called on all ranks.

    Args:
        hardware: gives the peaks.
        on_step: called with a link before it is measured.

    Raises:
        ConfigError: a link is faster than its peak.
    """
    found = {}
    for name, groups in link_groups(world).items():
        on_step(name)
        group, _ = torch.distributed.new_subgroups_by_enumeration(groups)
        ranks = len(groups[0])
        large, tiny = (_timed(size, ranks, group, device, timer) for size in sizes.message)
        found[name] = fit_link(hardware, name, ranks, large, tiny)
    return found


def exchanged(part: int, ranks: int) -> Work:
    """Returns the work of an all-gather and a reduce-scatter in which each rank has a part of so many bytes."""
    return Work(sent=Counter(Sent(operation, _GROUP, False, part * ranks // 2, 2) for operation in _OPERATIONS))


def _timed(
    size: int, ranks: int, group: torch.distributed.ProcessGroup, device: torch.device, timer: Timer
) -> tuple[Work, float]:
    """Times one all-gather with one reduce-scatter, and returns their work and seconds.

    Args:
        size: bytes of one rank's part.
    """
    part = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
    whole = torch.zeros(ranks * part.numel(), dtype=torch.bfloat16, device=device)

    def run() -> None:
        torch.distributed.all_gather_into_tensor(whole, part, group=group)
        torch.distributed.reduce_scatter_tensor(part, whole, group=group)

    return exchanged(part.nbytes, ranks), timer(run)


def fit_link(
    hardware: Hardware, name: str, ranks: int, large: tuple[Work, float], tiny: tuple[Work, float]
) -> Link:
    """Returns the link at which ``Hardware.send_seconds`` gives the measured seconds.

    Args:
        name: ``node`` or ``network``.
        ranks: number of ranks that exchanged.
        large: work of large messages, and its seconds.
        tiny: the same operations with tiny messages.

    Raises:
        ConfigError: it is faster than its peak.
    """
    link: Link = getattr(hardware, name)
    span = hardware.gpus_per_node if name == "node" else hardware.gpus_per_node + 1

    def seconds(work: Work, efficiency: float) -> float:
        without_latency = replace(link, efficiency=efficiency, latency_us=0.0)
        changed = replace(hardware, **{name: without_latency})
        return changed.send_seconds(work, {_GROUP: Group(ranks, span)})[0]

    # Latency is in both, so what the large messages take longer is of their bytes.
    longer = large[1] - tiny[1]
    efficiency = significant(
        efficiency_for(lambda value: seconds(large[0], value) - seconds(tiny[0], value), longer)
    )
    believable(efficiency, f"efficiency of [{name}]", f"gbytes_per_s = {link.gbytes_per_s}")
    latency = (tiny[1] - seconds(tiny[0], efficiency)) / tiny[0].sent.total()
    return replace(link, efficiency=efficiency, latency_us=significant(max(latency * 1e6, _LEAST_LATENCY)))
