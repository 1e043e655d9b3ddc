"""Keeps the trainer from compiling the dataset helpers, which the megatron-core wheel ships compiled."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from megasched.attributes import Undo, set_attribute
from megasched.patches.registry import Patch

_TARGET = "megatron.core.datasets.utils:compile_helpers"


def _helpers_folder() -> Path:
    spec = importlib.util.find_spec("megatron.core.datasets")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _unneeded() -> str | None:
    folder = _helpers_folder()
    if (folder / "Makefile").is_file():
        return f"{folder} has its Makefile"
    if not any(folder.glob("helpers_cpp*.so")):
        # Without the compiled module, Megatron's own "failed to compile" is the right message.
        return f"{folder} has no compiled helpers_cpp to use instead"
    return None


def _already_compiled() -> None:
    """Stands in for ``compile_helpers`` and does nothing: the wheel's helpers_cpp is there."""


def _change() -> Undo:
    return set_attribute(_TARGET, _already_compiled, rebind=("megatron",))


PATCH = Patch(
    name="wheel_helpers",
    targets=(_TARGET,),
    why=(
        "megatron/training/initialize.py:176 runs `make` in megatron/core/datasets, which the wheel ships "
        "with helpers_cpp compiled and without a Makefile: core/datasets/utils.py:20 then ends the process"
    ),
    change=_change,
    unneeded=_unneeded,
)
