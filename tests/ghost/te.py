"""Builds Transformer Engine's extension of torch for ghost CUDA, where there is no CUDA compiler and little time.

    python -m tests.ghost.te FOLDER

``make ghost`` calls it. NVIDIA publishes the compiled core as a wheel and the extension as sources, which pip
builds in a quarter of an hour. They are C++ alone: without optimization, and with what all of them include
compiled once, it is a few minutes. The extension does what it does; only the host is slower.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import requires, version
from pathlib import Path

from packaging.requirements import Requirement

from tests.ghost.build import GhostError, headers, required, why_not

VERSION = "2.20.2"  # as in tests/te/requirements.txt
FLAGS = ["-std=c++20", "-O0", "-g0", "-fPIC", "-fvisibility=hidden", "-w", "-DNDEBUG"]
FLAGS += ["-DTORCH_EXTENSION_NAME=transformer_engine_torch", "-DTORCH_API_INCLUDE_EXTENSION_H"]
NAME = "transformer_engine_torch.so"
NAMES = (
    "transformer-engine",
    "transformer-engine-cu13",
)  # of the wheels: Python's modules, and the core with them
COMPILERS = 2  # each takes 1.5 GiB


def oldest() -> str:
    """The oldest version that megasched takes, by its extra ``te``; NVIDIA's image has it (docs/docker.md)."""
    (found,) = (wanted for line in requires("megasched") or () if (wanted := Requirement(line)).name == NAMES[0])
    (floor,) = found.specifier
    return f"{floor.version}.0"


def install(folder: Path, te_version: str = VERSION) -> None:
    """Puts Transformer Engine into a folder for PYTHONPATH: its core's wheel, and the extension.

    Raises:
        GhostError: something can't be had or compiled; says what.
    """
    target = folder / "transformer_engine" / "wheel_lib" / NAME
    # An extension is bound to the torch that it was compiled with.
    stamp, made_for = folder / "made_for", f"{te_version} torch {version('torch')}"
    if target.exists() and stamp.exists() and stamp.read_text() == made_for:
        return
    wheels = [f"{name}=={te_version}" for name in NAMES]
    _pip("install", "--no-deps", "--upgrade", "--target", str(folder), *wheels)
    with tempfile.TemporaryDirectory() as work:
        source = _source(Path(work), te_version)
        built = _extension(source, Path(work))
        beside = target.with_suffix(f".{os.getpid()}")
        beside.write_bytes(built.read_bytes())
        beside.rename(target)
    stamp.write_text(made_for)


def _pip(*arguments: str) -> None:
    _run([sys.executable, "-m", "pip", arguments[0], "--quiet", *arguments[1:]])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise GhostError(f"{' '.join(command[:6])} ... fails:\n{done.stderr[-3000:]}")


def _source(work: Path, te_version: str) -> Path:
    package = f"transformer_engine_torch=={te_version}"
    _pip("download", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", "--dest", str(work), package)
    (archive,) = work.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(work, filter="data")
    return work / archive.name.removesuffix(".tar.gz")


def _extension(source: Path, work: Path) -> Path:
    torch = Path(sysconfig.get_path("purelib")) / "torch"
    own = ["common_headers", "common_headers/common", "common_headers/common/include", "csrc"]
    folders = [*(source / name for name in own), torch / "include"]
    folders += [torch / "include/torch/csrc/api/include", *headers(), Path(sysconfig.get_path("include"))]
    flags = [*FLAGS, *(f"-I{folder}" for folder in folders)]

    first = work / "first.h"
    first.write_text('#include "extensions.h"\n')
    _run(["g++", *flags, "-x", "c++-header", str(first), "-o", f"{first}.gch"])

    def compiled(path: Path) -> str:
        output = work / ("_".join(path.relative_to(source).parts) + ".o")
        _run(["g++", *flags, "-include", str(first), "-c", str(path), "-o", str(output)])
        return str(output)

    with ThreadPoolExecutor(COMPILERS) as threads:
        objects = list(threads.map(compiled, sorted(source.glob("csrc/**/*.cpp"))))
    built = work / NAME
    libraries = ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10_cuda", "-ltorch_cuda"]
    _run(["g++", "-shared", *objects, f"-L{torch / 'lib'}", *libraries, "-o", str(built)])
    return built


def main(folder: str) -> int:
    """Installs it; where that can't be done, the tests that need it are skipped, unless they are required."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    try:
        if missing := why_not():
            raise GhostError(missing)
        install(place)
    except GhostError as error:
        print(f"without tests of Transformer Engine on ghost GPUs: {error}", file=sys.stderr)
        return int(required())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
