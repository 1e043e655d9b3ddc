"""Processes that see ghost GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.one_rank import one_rank
from tests.ghost.build import library
from tests.process import ROOT

SITE = Path(__file__).parent / "site"
# Transformer Engine with its compiled parts, and what it imports.
TE = (Path(sys.prefix) / "ghost-te", Path(sys.prefix) / "te")
# Megatron's flags where it is not there.
WITHOUT_TE = ("--transformer-impl", "local", "--no-persist-layer-norm", "--no-masked-softmax-fusion")
WITHOUT_TE += ("--no-rope-fusion",)
# Whole numbers are computed on the host (site/ghost_torch.py): for mixtures, and for positions that are read.
INTEGERS = {"GHOST_INTEGERS": "1"}


class Failed(Exception):
    """A process on ghost CUDA ended with an error; says the end of what it printed."""


def environment(folder: str, devices: int = 1, te: bool = False, **more: str) -> dict[str, str]:
    """Variables of a process on ghost CUDA.

    Args:
        folder: where ranks of one run meet, empty and for this run alone.
        devices: GPUs that it sees.
        te: whether it sees Transformer Engine, the real one.
        more: further variables.
    """
    ghost = library()
    compiling = {name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}
    return {
        **compiling,  # what other tests switch off
        "LD_PRELOAD": str(ghost),
        "TRITON_LIBCUDA_PATH": str(ghost.parent),  # what its launchers are linked with
        "PYTHONPATH": os.pathsep.join(map(str, [SITE, ROOT, *(TE if te else ()), *_checkout()])),
        "GHOST_FOLDER": folder,
        "GHOST_DEVICES": str(devices),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # more are processes that import torch, for a handful of kernels
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # what Megatron asks for where it overlaps
        **more,
    }


def _checkout() -> list[str]:
    """The Megatron-LM that the tests run under, where it isn't the installed one (`make test-megatron`)."""
    return [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []


def run(arguments: Sequence[str], ranks: int = 1, te: bool = False, timeout: float = 300, **more: str) -> str:
    """Runs Python with these arguments, as one process or by torchrun, and returns what it prints.

    Raises:
        Failed: it failed; with the end of what it printed.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    alone = one_rank() if ranks == 1 else {}
    return run_command([sys.executable, *launcher, *arguments], ranks, te, timeout, **alone, **more)


def run_command(
    command: Sequence[str], devices: int = 1, te: bool = False, timeout: float = 300, **more: str
) -> str:
    """Runs a command that sees so many ghost GPUs, and returns what it prints.

    Raises:
        Failed: it failed; with the end of what it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command,
            env=environment(folder, devices, te, **more),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
    if done.returncode:
        raise Failed(done.stdout[-20000:])
    return done.stdout
