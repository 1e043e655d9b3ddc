"""NCCL among the ranks of this machine, a GPU each, by the groups that Megatron makes: values, and bytes a second.

One rank first, then as many as there are GPUs. Where there is one GPU, one rank is all: NCCL refuses two on it.

    python bench/gpu/nccl_groups.py FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megasched.files import write_whole

MOST_RANKS = 8
# Numbers that each rank brings: few, whose values are looked at, and 64 MiB of bf16.
FEW, MANY = 8, 32 << 20
REPEATS = 5
GROUPS = ("tp", "pp", "cp", "dp", "dp_cp", "ep", "mp")

# Takes the rank's numbers and a group; returns what there is afterwards.
Operation = Callable[[torch.Tensor, Any], torch.Tensor]


def all_reduce(mine: torch.Tensor, group: Any) -> torch.Tensor:
    dist.all_reduce(mine, group=group)
    return mine


def all_gather(mine: torch.Tensor, group: Any) -> torch.Tensor:
    gathered = mine.new_empty(group.size() * len(mine))
    dist.all_gather_into_tensor(gathered, mine, group=group)
    return gathered


def reduce_scatter(mine: torch.Tensor, group: Any) -> torch.Tensor:
    part = mine.new_empty(len(mine) // group.size())
    dist.reduce_scatter_tensor(part, mine, group=group)
    return part


def all_to_all(mine: torch.Tensor, group: Any) -> torch.Tensor:
    exchanged = torch.empty_like(mine)
    dist.all_to_all_single(exchanged, mine, group=group)
    return exchanged


def broadcast(mine: torch.Tensor, group: Any) -> torch.Tensor:
    dist.broadcast(mine, group_src=group.size() - 1, group=group)
    return mine


def shift(mine: torch.Tensor, group: Any) -> torch.Tensor:
    """To the next rank of the group, as pipeline stages send."""
    received, size, rank = torch.empty_like(mine), group.size(), group.rank()
    turns = [
        dist.P2POp(dist.isend, mine, group_peer=(rank + 1) % size, group=group),
        dist.P2POp(dist.irecv, received, group_peer=(rank - 1) % size, group=group),
    ]
    for request in dist.batch_isend_irecv(turns):
        request.wait()
    return received


OPERATIONS: dict[str, Operation] = {
    each.__name__: each for each in (all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, shift)
}


def brought(rank: int) -> list[int]:
    """The few numbers that a rank of a group brings."""
    return [100 * rank + number for number in range(FEW)]


def expected(name: str, rank: int, size: int) -> list[int]:
    """What a rank has after an operation on what all have brought."""
    all_of = [brought(each) for each in range(size)]
    summed = [sum(column) for column in zip(*all_of, strict=True)]
    part = slice(rank * FEW // size, (rank + 1) * FEW // size)
    found = {
        "all_reduce": summed,
        "all_gather": [number for each in all_of for number in each],
        "reduce_scatter": summed[part],
        "all_to_all": [number for each in all_of for number in each[part]],
        "broadcast": all_of[-1],
        "shift": all_of[(rank - 1) % size],
    }
    return found[name]


def groups() -> dict[str, Any]:
    """Megatron's groups of this rank by name; two ranks share a tensor, where there are two."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=min(2, dist.get_world_size()))
    made = ProcessGroupCollection.use_mpu_process_groups(list(GROUPS))
    return {**{name: getattr(made, name) for name in GROUPS}, "world": dist.group.WORLD}


def used(group: Any) -> dict[str, dict[str, Any]]:
    """Of each operation whether the values are right on this rank, and the bytes of a rank in a second."""
    found = {}
    for name, operation in OPERATIONS.items():
        if name == "shift" and group.size() == 1:
            continue  # a rank sends nothing to itself
        got = operation(torch.tensor(brought(group.rank())).cuda(), group).cpu().tolist()
        right = got == expected(name, group.rank(), group.size())
        many = torch.ones(MANY, dtype=torch.bfloat16, device="cuda")
        operation(many, group)  # buffers are made
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(REPEATS):
            operation(many, group)
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / REPEATS
        found[name] = {"right": right, "got": got, "bytes_per_second": many.nbytes / seconds}
    return found


def work(folder: Path) -> None:
    """One rank; rank 0 writes what all have seen."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    made = {name: {"size": group.size(), "operations": used(group)} for name, group in groups().items()}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, made)
    if dist.get_rank() == 0:
        told = {"nccl": ".".join(map(str, torch.cuda.nccl.version())), "ranks": ranks, "right": right(ranks)}
        write_whole(folder / f"ranks_{len(ranks)}.json", [json.dumps(told, indent=1), "\n"])
    dist.destroy_process_group()


def right(ranks: list[Mapping[str, Any]]) -> bool:
    """Whether every value is right on every rank."""
    groups = [group for rank in ranks for group in rank.values()]
    return all(one["right"] for group in groups for one in group["operations"].values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    if "RANK" in os.environ:
        work(folder)
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    several = min(torch.cuda.device_count(), MOST_RANKS)
    if several == 1:
        why = "one GPU: NCCL refuses two ranks on it, so one rank is all"
        write_whole(folder / "several.json", [json.dumps({"left_out": why}), "\n"])
    passed = True
    for ranks in dict.fromkeys((1, several)):
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        done = subprocess.run([sys.executable, *launcher, __file__, str(folder)], check=False)
        path = folder / f"ranks_{ranks}.json"
        passed &= not done.returncode and path.exists() and json.loads(path.read_text())["right"]
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
