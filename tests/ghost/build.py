"""Builds ghost CUDA: a library that stands before NVIDIA's, keeps device memory on the host and computes nothing.

It needs g++ and the headers that come with torch's CUDA build; no CUDA toolkit.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

SOURCES = Path(__file__).parent / "cuda"
TORCH_SIDE = Path(__file__).parent / "torch"
# Where outputs of a build go; git ignores it, and `make clean` removes it.
BUILD = Path(__file__).parents[2] / "build"
# What Megatron, torch and Transformer Engine open by this name is the ghost.
LIBRARY = "libcuda.so.1"


class GhostError(Exception):
    """Ghost CUDA can't be built here; says what is missing."""


def why_not() -> str:
    """Says what is missing to build it; nothing where it can be built."""
    if shutil.which("g++") is None:
        return "g++ is not on PATH: ghost CUDA is built by it"
    return ""


def required() -> bool:
    """Whether tests on ghost GPUs must run: ``MEGASCHED_REQUIRE_GHOST=1``, as CI has it."""
    return os.environ.get("MEGASCHED_REQUIRE_GHOST") == "1"


def library() -> Path:
    """Returns the library, which is built where these sources have not been.

    Beside it stands what torch loads (``site/ghost_torch.py``).

    Raises:
        GhostError: a header or the compiler is missing, or the compiler fails.
    """
    if missing := why_not():
        raise GhostError(missing)
    folder = BUILD / f"ghost-{_version()}"
    if not folder.exists():
        BUILD.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as beside:
            made = Path(beside) / "made"
            made.mkdir()
            _compile_ghost(made / LIBRARY)
            _compile_torch_side(made / "libghost_torch.so")
            try:
                made.rename(folder)
            except OSError:
                if not folder.exists():  # else another process has been faster
                    raise
    return folder / LIBRARY


def _version() -> str:
    files = [Path(__file__), *sorted(SOURCES.iterdir()), *sorted(TORCH_SIDE.iterdir())]
    told = b"".join(map(Path.read_bytes, files)) + version("torch").encode()
    return hashlib.sha256(told).hexdigest()[:12]


def _compile_ghost(output: Path) -> None:
    stubs = output.with_name("stubs.c")
    stubs.write_text("".join(_stubs()))
    # The stubs are C: there a function without arguments may stand for one with any.
    sources = ["-x", "c++", "-std=c++17", *map(str, sorted(SOURCES.glob("*.cpp"))), "-x", "c", str(stubs)]
    _compile([*sources, "-Wl,-soname," + LIBRARY, "-Wno-deprecated-declarations", "-ldl"], output)


def _compile_torch_side(output: Path) -> None:
    torch = Path(sysconfig.get_path("purelib")) / "torch"
    sources = ["-std=c++20", "-w", f"-I{torch / 'include'}", *map(str, sorted(TORCH_SIDE.glob("*.cpp")))]
    _compile([*sources, f"-L{torch / 'lib'}", "-lc10", "-lc10_cuda"], output)


def _compile(arguments: list[str], output: Path) -> None:
    folders = [f"-I{folder}" for folder in headers()]
    run = ["g++", "-O1", "-fPIC", "-shared", *folders, *arguments, "-o", str(output)]
    done = subprocess.run(run, capture_output=True, text=True)
    if done.returncode:
        raise GhostError(f"g++ can't build {output.name}:\n{done.stderr[:4000]}")


def headers() -> list[Path]:
    """The folders of NVIDIA's headers that pip has installed: with torch, and by tests/ghost/requirements.txt."""
    places = [Path(sysconfig.get_path("purelib")), Path(sys.prefix) / "ghost"]
    return [folder for place in places for folder in sorted(place.glob("nvidia/*/include"))]


def _header(name: str) -> str:
    for folder in headers():
        if (folder / name).exists():
            return (folder / name).read_text()
    raise GhostError(f"{name} is missing: torch of PyPI for Linux and `make ghost` bring it")


# Header -> what precedes a function's name in it, and what it returns where the ghost doesn't cover it: each
# library's own word for "not supported".
_APIS = {
    "cuda_runtime_api.h": (r"CUDARTAPI\s+", 801),
    "cuda.h": (r"CUDAAPI\s+|#define\s+cu\w+\s+", 801),
    "cublas_api.h": (r"CUBLASWINAPI\s+", 15),
    "nccl.h": (r"ncclResult_t\s+", 5),
}
# What the real libraries answer without a GPU.
_REAL = {"cudaGetErrorName", "cudaGetErrorString", "cublasGetVersion_v2", "cublasGetStatusName"}
_REAL |= {"cublasGetStatusString", "cublasGetProperty", "cublasGetCudartVersion"}


def _stubs() -> Iterator[str]:
    """A weak function for each that a program can call: it says that the ghost doesn't cover it, and fails.

    So no call gets through to NVIDIA's libraries, which would look for a GPU. What a source file defines replaces
    it.
    """
    yield "void ghost_refuse(const char*);\n"
    for header, (before, refused) in _APIS.items():
        names = set(re.findall(rf"(?:{before})((?:cu|nccl)\w+)\b", _header(header)))
        for name in sorted(names - _REAL):
            yield f'__attribute__((weak)) int {name}() {{ ghost_refuse("{name}"); return {refused}; }}\n'
