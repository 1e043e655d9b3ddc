"""What a benchmark's figures were taken on, for the results file."""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def describe() -> dict[str, Any]:
    """Processor, cores, GPU, versions and commit."""
    import torch

    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if on_gpu() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megatron-core": version("megatron-core"),
        "transformers": version("transformers"),
        "commit": _commit(),
    }


def on_gpu() -> bool:
    """Whether there is a GPU, whatever the emulation of CUDA says."""
    import torch

    return torch.version.cuda is not None and torch._C._cuda_getDeviceCount() > 0


def _commit() -> str | None:
    """The short one of this code, which a kit for a bare machine has written down; None where nobody knows."""
    packed = RESULTS.parents[1] / "COMMIT"
    if packed.exists():
        return packed.read_text()[:7]
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return found.stdout.strip() or None


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def cpu_seconds_of_children() -> float:
    """Of children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def write(name: str, data: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Writes ``NAME.json`` into a folder, beside and renamed."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"machine": describe(), **data}, indent=1) + "\n")
    part.replace(path)
    return path
