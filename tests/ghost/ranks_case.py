"""What ranks on ghost GPUs hand over to each other by NCCL; each prints it as JSON (``test_library.py``)."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist


def found() -> dict[str, object]:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.tensor([rank + 1, 10 * rank], device="cuda")
    summed, largest = mine.clone().copy_(mine.cpu()), torch.tensor([float(rank)], device="cuda")
    dist.all_reduce(summed)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    gathered = torch.empty(2 * size, dtype=mine.dtype, device="cuda")
    dist.all_gather_into_tensor(gathered, mine)
    told = torch.tensor([rank], device="cuda")
    dist.broadcast(told, src=1)
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    large = [None] * size  # as what a checkpoint holds is told
    dist.all_gather_object(large, f"text {rank} " * 10000)
    exchanged = torch.empty(size, dtype=torch.int64, device="cuda")
    dist.all_to_all_single(exchanged, torch.arange(size).add(10 * rank).cuda())
    part = torch.empty(1, dtype=mine.dtype, device="cuda")
    dist.reduce_scatter_tensor(part, mine)
    neighbour = torch.empty(1, dtype=torch.int64, device="cuda")
    sent = torch.tensor([100 + rank], device="cuda")
    turns = [dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, neighbour, 1 - rank)]
    for request in dist.batch_isend_irecv(turns):
        request.wait()
    tensor = torch.ones(10**6, device="cuda")
    dist.all_reduce(tensor)
    return {
        "summed": summed.tolist(),
        "largest": largest.item(),
        "gathered": gathered.tolist(),
        "told": told.item(),
        "objects": objects,
        "large": [text == f"text {number} " * 10000 for number, text in enumerate(large)],
        "exchanged": exchanged.tolist(),
        "part": part.item(),
        "neighbour": neighbour.item(),
    }


if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    # One write, so that the lines of two ranks don't mix.
    sys.stdout.write(json.dumps({"rank": dist.get_rank(), **found()}) + "\n")
    dist.destroy_process_group()
