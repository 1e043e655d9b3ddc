"""The wheel holds everything under one name, and the editable install is the same package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DATA = ("megasched/cli/page/template", "megasched/planner/hardware/gpus")
# Of jobs, and what they are made of.
SCRIPTS = ("*.jinja", "*.sbatch")
FOLDERS = {
    "patches": "megasched/patches",
    "launch": "megasched/launch",
    "model_adapters": "megasched/model_adapters",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from a copy of the tree, as `pip wheel .` does."""
    copy = tmp_path_factory.mktemp("source") / "megasched"
    anywhere = shutil.ignore_patterns(".venv", ".git", "build", "*.egg-info", "__pycache__", ".*_cache")

    def ignored(folder: str, names: list[str]) -> set[str]:
        # What `make quickstart` has left.
        return anywhere(folder, names) | ({"quickstart"} if Path(folder) == ROOT else set())

    shutil.copytree(ROOT, copy, ignore=ignored, symlinks=True)
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(copy / "dist"),
        str(copy),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return next((copy / "dist").glob("*.whl"))


def modules_of(folder: Path, prefix: str) -> set[str]:
    return {
        f"{prefix}/{path.relative_to(folder)}" for path in folder.rglob("*.py") if "__pycache__" not in path.parts
    }


def test_the_wheel_holds_every_module_under_one_top_level_name(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    data = {
        "megasched/py.typed",
        "megasched/language/primitive_calls.pyi",
        "megasched/trainer/evidence/compatibility.json",
    }
    data |= {f"{folder}/{path.name}" for folder in DATA for path in (ROOT / folder).iterdir()}
    data |= {
        f"megasched/{path.relative_to(ROOT)}" for ending in SCRIPTS for path in (ROOT / "launch").rglob(ending)
    }
    expected = modules_of(ROOT / "megasched", "megasched") | data
    for folder, place in FOLDERS.items():
        expected |= modules_of(ROOT / folder, place)
    assert names == expected


def test_the_wheel_runs_where_it_is_installed(wheel, tmp_path):
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
    script = (
        "import megasched, megasched.patches, megasched.launch, megasched.model_adapters as adapters\n"
        "from megasched.launch import bundled_script\n"
        "print(megasched.__file__, adapters.__file__, bundled_script('pretrain_gpt.py'), sep='\\n')\n"
        "print(*megasched.list_primitives(name_only=True))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(target)}
    run = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    *places, primitives = run.stdout.splitlines()
    assert all(place.startswith(str(target)) for place in places)
    assert "shard" in primitives.split()


def test_the_editable_install_is_this_tree():
    import megasched.launch
    import megasched.model_adapters
    import megasched.patches

    for module, folder in (
        (megasched, "megasched"),
        (megasched.patches, "patches"),
        (megasched.launch, "launch"),
        (megasched.model_adapters, "model_adapters"),
    ):
        assert Path(module.__file__).resolve().parent == ROOT / folder
