"""Megatron's own trainer on a ghost GPU; each rank writes what its steps ask.

    python -m tests.ghost.trainer_case FOLDER SCRIPT.py FLAGS

Where the flags name a schedule it trains under megasched, else Megatron's own model, by a script that megasched
brings.

``FOLDER/events.RANK`` has a ``mark:step`` where a step begins and a ``mark:end`` after it. ``FOLDER/facts.RANK``
is JSON: ``built``, the bytes in torch's allocator once the model is built; ``steps``, those when a step begins,
and its ``peak``, all without Transformer Engine's ``workspaces`` for cuBLAS; ``groups``, what groups of ranks are
for, by the names that communicators have in events.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from megasched import patches
from megasched.trainer import entry

GHOST = ctypes.CDLL(None)


def mark_steps(facts: dict[str, Any]) -> None:
    """Has Megatron's trainer say where a step begins and ends, and note its memory."""
    import torch
    from megatron.training import training

    train_step, get_optimizer = training.train_step, training.get_megatron_optimizer
    if hasattr(train_step, "marked"):
        return

    count_workspaces(facts)

    @functools.wraps(get_optimizer)
    def noted(*args: Any, **kwargs: Any) -> Any:
        facts["built"] = torch.cuda.memory_allocated() - facts["workspaces"]
        return get_optimizer(*args, **kwargs)

    @functools.wraps(train_step)
    def marked(*args: Any, **kwargs: Any) -> Any:
        torch.cuda.reset_peak_memory_stats()
        begin = torch.cuda.memory_allocated() - facts["workspaces"]
        GHOST.ghost_mark(b"step")
        made = train_step(*args, **kwargs)
        GHOST.ghost_mark(b"end")
        peak = torch.cuda.max_memory_allocated() - facts["workspaces"]
        facts["steps"].append({"begin": begin, "peak": peak})
        return made

    marked.marked = True  # type: ignore[attr-defined]
    training.get_megatron_optimizer, training.train_step = noted, marked


def count_workspaces(facts: dict[str, Any]) -> None:
    """Has Transformer Engine, where it is there, say how large each workspace for cuBLAS is that it makes."""
    gemm = sys.modules.get("transformer_engine.pytorch.cpp_extensions.gemm")
    if gemm is None:
        return
    size_of = gemm.get_cublas_workspace_size_bytes

    def counted() -> int:
        size: int = size_of()
        facts["workspaces"] += size
        return size

    gemm.get_cublas_workspace_size_bytes = counted  # type: ignore[attr-defined]


def groups() -> dict[str, str]:
    """What the groups of this rank are for, by the names that their communicators have in events."""
    import torch
    from torch.distributed import ProcessGroupNCCL, distributed_c10d

    GHOST.ghost_name_of.restype = ctypes.c_char_p
    gpu, found = torch.device("cuda"), {}
    for group in distributed_c10d._world.pg_map:
        backend = group._get_backend(gpu) if gpu in group._device_types else None
        address = backend._comm_ptr() if isinstance(backend, ProcessGroupNCCL) else 0
        if address:  # else it has sent nothing
            found[GHOST.ghost_name_of(ctypes.c_void_p(address)).decode()] = group.group_desc
    return found


def run(folder: str, script: str, flags: list[str]) -> None:
    """Trains, and writes the events of this rank, and the facts."""
    rank = os.environ.get("RANK", "0")
    facts: dict[str, Any] = {"steps": [], "workspaces": 0}
    GHOST.ghost_start()
    if "--model-schedule" in flags:
        _scheduled(script, flags, facts)
    else:
        patches.apply("dataset_helpers")  # the wheel has no Makefile, and the trainer would call make
        mark_steps(facts)
        sys.argv = [script, *flags]
        runpy.run_path(str(entry.bundled_script(script)), run_name="__main__")
    GHOST.ghost_write(os.path.join(folder, f"events.{rank}").encode())
    facts["groups"] = groups()
    Path(folder, f"facts.{rank}").write_text(json.dumps(facts))


def _scheduled(script: str, flags: list[str], facts: dict[str, Any]) -> None:
    run_path = entry.runpy.run_path

    def marked(*args: Any, **kwargs: Any) -> Any:  # by then all of megasched's patches are in place
        mark_steps(facts)
        return run_path(*args, **kwargs)

    with mock.patch.object(entry.runpy, "run_path", marked):
        entry.run_script(script, flags)


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], sys.argv[3:])
