"""Packs what checks a GPU on a bare machine into one archive of at most 64 MiB; `run.sh` in it does the rest.

Such a machine has Python 3.12, CUDA 13 with nvcc, torch and transformers, and reaches no network. The archive
brings megasched, Megatron and the others of ``requirements.txt`` as they are installed, Transformer Engine's core
cut down to the machine code for one kind of GPU, and the sources of its extension for torch, which is built there.
It is made of this commit: what is not committed stays behind. With ``--extension`` a wheel of the extension, built
for the torch of that machine, goes along instead of its sources, which saves the time there.

    python bench/gpu/pack.py build/gpu_kit.tar [--extension WHEEL]
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import fatbin

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
REQUIREMENTS = HERE / "requirements.txt"
LIMIT = 64 << 20
# Compute capability of an H100 and an H200.
GPU = 90
CORE = "transformer_engine/wheel_lib/libtransformer_engine.so"
EXTENSION = "transformer_engine_torch"
# What of Transformer Engine no step uses: JAX, and experts over NCCL.
LEFT_OUT = ("transformer_engine/jax", "transformer_engine/wheel_lib/nccl_ep")
LEFT_OUT += ("transformer_engine/wheel_lib/libnccl_ep.so", "bin")
# For packages with compiled parts.
MACHINE = ("--python-version", "3.12", "--platform", "manylinux_2_28_x86_64", "--platform", "manylinux2014_x86_64")


class PackError(Exception):
    """The archive can't be made as it must be; says why."""


def pack(target: Path, extension: Path | None = None) -> int:
    """Makes the archive and returns its bytes.

    Args:
        target: the archive.
        extension: a wheel of Transformer Engine's extension for torch; its sources where None.

    Raises:
        PackError: a command fails, or the archive is too large.
        FormatError: Transformer Engine's core is not as known.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        tree, site, kit = (Path(work) / name for name in ("tree", "site", "kit"))
        checkout(tree)
        install(tree, Path(work), site)
        cut_down(site)
        kit.mkdir()
        if extension is None:
            as_sources = ("--no-deps", "--no-build-isolation", "--no-binary", ":all:")
            _pip("download", *as_sources, "--dest", str(kit), sources())
        else:
            shutil.copy(extension, kit)
        _compress(site, kit / "site.tar.xz")
        (kit / "COMMIT").write_text(_output("git", "-C", str(ROOT), "rev-parse", "HEAD"))
        (tree / "bench").rename(kit / "bench")
        (kit / "bench" / "gpu" / "run.sh").rename(kit / "run.sh")
        with tarfile.open(target, "w") as archive:
            archive.add(kit, "gpu_kit")
    return check_size(target)


def check_size(target: Path) -> int:
    """The bytes of an archive.

    Raises:
        PackError: they are more than ``LIMIT``; the archive is removed.
    """
    size = target.stat().st_size
    if size > LIMIT:
        target.unlink()
        raise PackError(f"{target.name} would have {size / 2**20:.1f} MiB, more than {LIMIT >> 20}")
    return size


def checkout(folder: Path) -> None:
    """Writes this commit's files into a folder."""
    with tempfile.NamedTemporaryFile(suffix=".tar") as archive:
        _run("git", "-C", str(ROOT), "archive", "--output", archive.name, "HEAD")
        with tarfile.open(archive.name) as packed:
            packed.extractall(folder, filter="data")


def install(tree: Path, work: Path, site: Path) -> None:
    """Installs the packages that the machine lacks into a folder, for its Python, and megasched."""
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(work), str(tree))
    (wheel,) = work.glob("megasched-*.whl")
    wanted = ["--requirement", str(tree / "bench" / "gpu" / "requirements.txt"), str(wheel)]
    compiled = ("--no-deps", "--no-compile", "--only-binary", ":all:", *MACHINE)
    _pip("install", *compiled, "--target", str(site), *wanted)


def cut_down(site: Path) -> None:
    """Removes what no step uses, and machine code for other GPUs."""
    for name in LEFT_OUT:
        _run("rm", "-rf", str(site / name))
    fatbin.keep(site / CORE, GPU)
    _run("strip", "--strip-unneeded", str(site / CORE))


def sources() -> str:
    """The requirement of the extension's sources: the version of the core."""
    wanted = dict(line.split("==") for line in REQUIREMENTS.read_text().splitlines() if "==" in line)
    return f"{EXTENSION}=={wanted['transformer-engine']}"


def _compress(folder: Path, target: Path) -> None:
    names = ["--sort=name", "--owner=0", "--group=0", "--use-compress-program=xz -9e -T2"]
    _run("tar", *names, "--create", "--file", str(target), "--directory", str(folder), ".")


def _pip(*arguments: str) -> None:
    _run(sys.executable, "-m", "pip", arguments[0], "--quiet", *arguments[1:])


def _run(*command: str) -> None:
    _output(*command)


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PackError(f"{' '.join(command[:6])} ... fails:\n{done.stderr[-3000:]}")
    return done.stdout


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path, nargs="?", default=ROOT / "build" / "gpu_kit.tar")
    parser.add_argument("--extension", type=Path, metavar="WHEEL", help="of Transformer Engine for that torch")
    options = parser.parse_args(argv)
    target = options.archive
    try:
        size = pack(target, options.extension)
    except (PackError, fatbin.FormatError) as error:
        print(f"{error}", file=sys.stderr)
        return 1
    print(f"{target}: {size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
