"""Finds the CUDA headers with which Transformer Engine compiles kernels while a run goes on.

Since release 2.20, Transformer Engine compiles its norms with NVRTC at their first call
(https://github.com/NVIDIA/TransformerEngine/pull/3156). Without the headers that call fails on every rank, after
the model is built.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from packaging.version import Version

FIRST_TO_COMPILE = Version("2.20")
HEADER = "cuda_runtime.h"
VARIABLES = ("NVTE_CUDA_INCLUDE_DIR", "CUDA_HOME", "CUDA_DIR")
TOOLKIT = Path("/usr/local/cuda")
REMEDY = "Set NVTE_CUDA_INCLUDE_DIR to the folder that holds it, e.g. that of pip install nvidia-cuda-runtime"


def headers_problem(te_version: str, cuda: str, environ: Mapping[str, str] = os.environ) -> str:
    """Returns what is wrong with the headers; empty where nothing is, or where Transformer Engine needs none.

    Args:
        te_version: version of the installed Transformer Engine.
        cuda: version of CUDA for which torch is built, e.g. ``13.0``.
    """
    if Version(te_version) < FIRST_TO_COMPILE or cuda_headers(cuda, environ) is not None:
        return ""
    places = ", ".join([*VARIABLES, "nvidia's Python packages", str(TOOLKIT)])
    return (
        f"Transformer Engine {te_version} compiles its norms at their first call and finds no {HEADER} by "
        f"{places}: that call will fail. {REMEDY}"
    )


def cuda_headers(cuda: str, environ: Mapping[str, str]) -> Path | None:
    """Returns the folder of headers that Transformer Engine takes; None without headers.

    The search follows its common/util/cuda_runtime.cpp and common/__init__.py.
    """
    for root in _roots(cuda, environ):
        for folder in (root, root / "include"):
            if (folder / HEADER).is_file():
                return folder
    return None


def _roots(cuda: str, environ: Mapping[str, str]) -> Iterator[Path]:
    named = [environ.get(variable, "") for variable in VARIABLES]
    yield from (Path(name) for name in named if name)
    major = cuda.partition(".")[0]
    layouts = [f"cu{major}", *(["cuda_runtime"] if major == "12" else [])]
    yield from (Path(folder) / layout for layout in layouts for folder in _nvidia_packages())
    yield TOOLKIT


def _nvidia_packages() -> Sequence[str]:
    spec = importlib.util.find_spec("nvidia")
    return [] if spec is None else spec.submodule_search_locations or []
