"""Finds which parts of NVIDIA's apex are installed, and whether something else goes by its name.

The package called ``apex`` on PyPI is an unrelated project, and a mere folder of that name can be imported
too. So the name proves nothing: each part has its own compiled module at top level, which nothing else
ships. Modules are searched for, never imported.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

# Compiled module -> what it means for a run that it is not here. Adam and the norm: megatron/core/optimizer/,
# __init__.py and clip_grads.py; the weight gradient: megatron/core/tensor_parallel/layers.py:1070.
PARTS = {
    "amp_C": "Transformer Engine has Adam and gradient norm too; else they go tensor by tensor",
    "fused_weight_gradient_mlp_cuda": "a run switches gradient accumulation fusion off",
    "fused_layer_norm_cuda": "not needed: only layers of Megatron's own use it",
    "fast_layer_norm": "not needed: only layers of Megatron's own use it",
}
# Python packages of NVIDIA's apex, also in a build without compiled parts.
_OWN_FOLDERS = ("multi_tensor_apply", "normalization", "optimizers")


@dataclass(frozen=True)
class Apex:
    """Describes the installed parts of apex, and the package that goes by its name.

    Attributes:
        parts: compiled module -> whether it is installed.
        folder: what ``import apex`` would import; empty where there is nothing.
        problem: what is wrong with that package; empty where nothing is.
        remedy: how to solve the problem.
    """

    parts: dict[str, bool]
    folder: str = ""
    problem: str = ""
    remedy: str = ""


def find_apex() -> Apex:
    """Looks for apex on this process's ``sys.path``."""
    parts = {name: _is_compiled(name) for name in PARTS}
    folder = _folder_of("apex")
    if not folder or any(parts.values()):
        return Apex(parts, folder)
    if all((Path(folder) / name).is_dir() for name in _OWN_FOLDERS):
        problem = "NVIDIA's apex without its compiled parts: nothing in it can be used"
        return Apex(parts, folder, problem, "build it again with its C++ and CUDA extensions, or remove it")
    problem = "not NVIDIA's apex, yet Megatron takes whatever can be imported under this name for it"
    return Apex(parts, folder, problem, _removal(folder))


def _is_compiled(name: str) -> bool:
    spec = _find(name)
    return spec is not None and str(spec.origin or "").endswith(tuple(EXTENSION_SUFFIXES))


def _folder_of(name: str) -> str:
    spec = _find(name)
    if spec is None:
        return ""
    places = list(spec.submodule_search_locations or [])
    return str(places[0]) if places else str(spec.origin)


def _find(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ValueError:  # loaded by hand, without a spec
        return None


def _removal(folder: str) -> str:
    """Returns how to remove a wrong apex: by pip where pip installed it, otherwise by hand."""
    try:
        files = distribution("apex").files or []
    except PackageNotFoundError:
        return f"rename or remove {folder}, or take {Path(folder).parent} off PYTHONPATH"
    installed = {Path(str(file.locate())).parent.resolve() for file in files}
    if Path(folder).resolve() in installed:
        return "pip uninstall apex"
    return f"rename or remove {folder}; another one is installed besides: pip uninstall apex"
