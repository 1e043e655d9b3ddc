"""The wheel holds all under one name and works without a checkout; the editable install is the same package."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import megasched

ROOT = Path(__file__).resolve().parent.parent
DATA = ("megasched/cli/page/template", "megasched/planner/hardware/gpus")
# Of jobs, and what they are made of.
SCRIPTS = ("*.jinja", "*.sbatch")
FOLDERS = {
    "patches": "megasched/patches",
    "launch": "megasched/launch",
    "model_adapters": "megasched/model_adapters",
    "examples/schedules": "megasched/examples/schedules",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel of the source archive of what a container's build sees of the tree."""
    copy = tmp_path_factory.mktemp("source") / "megasched"
    compiled = shutil.ignore_patterns("__pycache__")
    copy.mkdir()
    for name in re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=compiled)
        else:
            shutil.copy(ROOT / name, copy / name)
    command = [
        sys.executable,
        "-m",
        "build",
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


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The programs of an environment that holds the wheel, and sees the packages of this one but its megasched."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True)
    # Of a folder that a .pth file adds no .pth files are read: the finder of the editable install is one.
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin"


def run_in(folder: Path, *command: str | Path) -> str:
    """What a command prints, started where no checkout is."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["OMP_NUM_THREADS"] = "1"
    run = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout


def test_the_wheel_is_imported_where_it_is_installed(installed, tmp_path):
    script = (
        "import megasched, megasched.patches, megasched.launch, megasched.model_adapters as adapters\n"
        "from megasched.launch import bundled_script\n"
        "from megasched.launch.quickstart.run_plan import default_schedule\n"
        "used = bundled_script('pretrain_gpt.py'), default_schedule()\n"
        "print(megasched.__file__, adapters.__file__, *used, sep='\\n')\n"
        "print(*megasched.list_primitives(name_only=True))\n"
    )
    *files, primitives = run_in(tmp_path, installed / "python", "-c", script).splitlines()
    assert all(file.startswith(str(installed.parent)) and Path(file).is_file() for file in files)
    assert "shard" in primitives.split()


def test_a_version_is_one_everywhere(installed, tmp_path):
    assert run_in(tmp_path, installed / "megasched", "--version") == f"megasched {megasched.__version__}\n"
    assert "quickstart" in run_in(tmp_path, installed / "python", "-m", "megasched", "--help")
    assert version("megasched") == megasched.__version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == megasched.__version__


def test_a_job_is_written_without_a_checkout(installed, tmp_path):
    run = ["pretrain_gpt.py", "--model-schedule", "auto", "--hf-model", "model"]
    run += ["--save", "ck", "--save-interval", "9"]
    launch = (installed / "megasched", "launch")
    for words in (("slurm", "--nodes", "2"), ("torchrun",)):
        script = run_in(tmp_path, *launch, *words, "--dry-run", "--no-check", "--", *run)
        assert f"{installed}/python" in script


@pytest.mark.slow
def test_the_commands_run_without_a_checkout(installed, tmp_path):
    program = installed / "megasched"
    found = json.loads(run_in(tmp_path, program, "doctor", "--json"))
    assert (found["runnable"], found["version"], found["problems"]) == (True, megasched.__version__, [])
    trained = json.loads(run_in(tmp_path, program, "quickstart", "--iters", "2", "--json"))
    assert f"-m megasched {installed.parent}" in trained["script"]
    assert (tmp_path / "quickstart" / "run-1" / "checkpoints" / "latest_checkpointed_iteration.txt").is_file()
    (show,) = (step["command"] for step in trained["next"] if " show " in step["command"])
    assert "LlamaForCausalLM" in run_in(tmp_path, *show.split())
    proposed = run_in(tmp_path, program, "new-adapter", "--hf-model", "quickstart/model")
    assert "No adapter is needed" in proposed
    assert "| `llama` |" in run_in(tmp_path, program, "archs", "--markdown")


def test_uv_locks_what_is_declared_in_the_versions_that_are_pinned():
    locked = {one["name"]: one for one in tomllib.loads((ROOT / "uv.lock").read_text())["package"]}
    lines = (line.partition("#")[0] for line in (ROOT / "constraints.txt").read_text().splitlines())
    pinned = {
        canonicalize_name(name): wanted for name, _, wanted in (line.strip().partition("==") for line in lines)
    }
    # What serves the tests alone is pinned, too, and not declared; what needs a GPU is declared and not pinned.
    both = pinned.keys() & locked.keys()
    assert len(both) > 100
    assert {name: locked[name]["version"] for name in both} == {name: pinned[name] for name in both}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = [Requirement(text) for text in project["dependencies"]]
    declared += [Requirement(f"{text}; extra == '{extra}'") for extra, texts in extras.items() for text in texts]
    metadata = locked["megasched"]["metadata"]
    assert sorted(metadata["provides-extras"]) == sorted(extras)
    assert Counter(map(_as_locked, declared)) == Counter(
        (one["name"], SpecifierSet(one.get("specifier", "")), one.get("marker", ""))
        for one in metadata["requires-dist"]
    )


def _as_locked(declared: Requirement) -> tuple[str, SpecifierSet, str]:
    marker = "" if declared.marker is None else str(declared.marker).replace('"', "'")
    return canonicalize_name(declared.name), declared.specifier, marker


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
