"""Two steps of a loop of one's own over a built model, on each of some ghost GPUs; see test_own_loops.py.

torchrun ... -m tests.ghost.own_loop_case FAMILY JSON_OF_OPTIONS
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

import megasched


def start(sizes: dict[str, int]) -> torch.device:
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    distributed.init_process_group("nccl", device_id=device)
    parallel_state.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(1)
    return device


def wrapped(model: Any, trainer: str) -> nn.Module:
    """The model as FSDP2 or DDP has it, over the ranks that have the same parameters."""
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if trainer == "ddp":
        return DistributedDataParallel(model, process_group=replicas)
    if trainer == "fsdp2":
        mesh = DeviceMesh.from_group(replicas, "cuda")
        for layer in model.get_submodule(model.base_model_prefix).layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return model


def resumed(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Saves a checkpoint of PyTorch and loads it again."""
    for do in (dcp.save, dcp.load):
        weights, moments = megasched.get_state_dict(model, optimizer)
        do({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    megasched.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


def run(folder: str, options: dict[str, Any]) -> None:
    device = start(options["sizes"])
    autocast = options.get("autocast", False)
    dtype = torch.float32 if autocast else torch.bfloat16
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    sch = megasched.create_schedule(
        model.to(device).train(), name="auto", sequence_parallel=options.get("sp", False)
    )
    sch.level(options.get("level", "fused"))
    model = megasched.build(sch)
    called = wrapped(model, options.get("trainer", ""))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(4, 500, (2, 128)).to(device)
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16) if autocast else nullcontext():
            loss = called(input_ids=ids, labels=ids).loss
        loss.backward()
        megasched.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if "saved" in options:
        resumed(model, optimizer, options["saved"])
    print("trained\n", end="")  # in one write, as other ranks write into the same pipe


if __name__ == "__main__":
    run(sys.argv[1], json.loads(sys.argv[2]))
