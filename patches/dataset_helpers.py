"""Has the C++ helpers of Megatron's datasets there, by the interpreter that will import them.

The trainer runs ``make`` in their folder. The wheel ships them compiled and without a Makefile. That of a
checkout asks the ``python3`` of PATH, which may be another than this one, may have no pybind11 (torch has its
headers) and no ``python3-config`` beside it; two jobs that begin at a time write one file.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sysconfig
from pathlib import Path

from megasched.attributes import Undo, set_attribute
from megasched.errors import ConfigError
from megasched.patches.registry import Patch

_TARGET = "megatron.core.datasets.utils:compile_helpers"
_LINES = 15  # of a compiler's complaint


def _folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _helpers_folder() -> Path:
    return _folder_of("megatron.core.datasets")


def _unneeded() -> str | None:
    folder = _helpers_folder()
    if not (folder / "Makefile").is_file() and not any(folder.glob("helpers_cpp*.so")):
        # Megatron's own "failed to compile" is the right message.
        return f"{folder} has neither a Makefile nor compiled helpers_cpp"
    return None


def compiled() -> None:
    """Stands in for ``compile_helpers``: compiles with the Makefile of a checkout what is not compiled yet.

    Raises:
        ConfigError: it can't be compiled.
    """
    folder = _helpers_folder()
    source, library = folder / "helpers.cpp", folder / f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    fresh = library.is_file() and (not source.is_file() or library.stat().st_mtime >= source.stat().st_mtime)
    if fresh or not (folder / "Makefile").is_file():
        return
    beside = f"{library.name}.{os.uname().nodename}.{os.getpid()}"  # folders of checkouts are shared
    headers = (sysconfig.get_path("include"), _folder_of("torch") / "include")
    flags = " ".join(f"-I{folder}" for folder in headers)
    done = subprocess.run(
        ["make", "-C", str(folder), f"OUT={beside}", f"CPPFLAGS={flags}"], capture_output=True, text=True
    )
    if done.returncode != 0:
        (folder / beside).unlink(missing_ok=True)
        said = "\n".join(done.stderr.splitlines()[-_LINES:])
        raise ConfigError(
            f"the helpers of Megatron's datasets in {folder} can't be compiled; g++, make, the headers of this "
            f"Python ({headers[0]}) and leave to write there are needed:\n{said}"
        )
    os.replace(folder / beside, library)


def _change() -> Undo:
    return set_attribute(_TARGET, compiled, rebind=("megatron",))


PATCH = Patch(
    name="dataset_helpers",
    targets=(_TARGET,),
    why=(
        "megatron/training/initialize.py:176 runs `make` in megatron/core/datasets, which the wheel ships with "
        "helpers_cpp compiled and without a Makefile: core/datasets/utils.py:20 then ends the process. In a "
        "checkout core/datasets/Makefile:2 needs pybind11 in whatever python3 is first on PATH"
    ),
    change=_change,
    unneeded=_unneeded,
)
