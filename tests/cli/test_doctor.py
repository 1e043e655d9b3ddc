"""``megasched doctor``: what it finds, and when it says that no run can start."""

import re
import sys
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from megasched.cli import cuda_headers, doctor, installation
from megasched.cli.apex import PARTS, Apex
from megasched.cli.doctor import print_diagnosis
from megasched.errors import ConfigError
from megasched.patches import registry
from megasched.trainer import seams
from megasched.transformers_names import NAMES, PrivateName


@pytest.fixture(scope="module")
def diagnosis():
    return doctor.diagnose()


def with_package(monkeypatch, **changes):
    """A doctor to whom one package looks different."""
    find = installation.find_packages

    def changed():
        return [replace(p, **changes) if p.name == changes["name"] else p for p in find()]

    monkeypatch.setattr(doctor, "find_packages", changed)
    return doctor.diagnose()


def printed(diagnosis, width=100):
    console = Console(width=width, file=StringIO(), highlight=False, markup=False)
    print_diagnosis(diagnosis, console)
    return console.file.getvalue()


def test_this_installation_can_run(diagnosis):
    assert diagnosis.problems == []
    assert diagnosis.runnable
    found = {package.name: package for package in diagnosis.packages}
    assert list(found)[:4] == ["python", "torch", "megatron-core", "transformers"]
    assert found["megatron-core"].supported == ">=0.19,<0.21"
    assert found["megatron-core"].where.endswith("megatron")
    assert not found["transformer-engine"].required


def test_every_optional_package_has_its_cost(diagnosis):
    assert {p.name for p in diagnosis.packages if not p.required} == set(installation.COSTS)


def test_all_patches_are_told(diagnosis):
    assert [patch.name for patch in diagnosis.patches] == [patch.name for patch in seams.available()]
    applied = {patch.name: patch.applied for patch in diagnosis.patches}
    assert applied["arguments"] == "always"
    assert applied["host_cuda"] == "rehearsal"
    assert all(patch.why and patch.versions for patch in diagnosis.patches)


def test_the_diagnosis_applies_no_patch():
    before = registry.active()
    told = [patch.name for patch in doctor.diagnose().patches if patch.active]
    assert registry.active() == before
    assert sorted(told) == sorted(before)


def test_a_version_out_of_range(monkeypatch):
    diagnosis = with_package(monkeypatch, name="transformers", found="4.57.0")
    assert not diagnosis.runnable
    assert diagnosis.problems == ["transformers 4.57.0 is not supported: pip install 'transformers>=5.17,<5.25'"]
    assert "not supported" in printed(diagnosis)


@pytest.mark.parametrize("package", ["megatron-core", "torch", "transformers"])
def test_a_newer_version_than_tested_is_a_door(monkeypatch, package):
    diagnosis = with_package(monkeypatch, name=package, found="99.1")
    assert diagnosis.runnable
    (warning,) = (line for line in diagnosis.warnings if "99.1" in line)
    assert warning.startswith(f"{package} 99.1 is newer than what megasched was tested with (>=")
    found = {each["name"]: each for each in diagnosis.to_dict()["packages"]}[package]
    assert (found["ok"], found["untested"]) == (False, True)
    assert "newer than tested" in printed(diagnosis)
    assert f"ready by --allow-unverified ({package})" in printed(diagnosis)


def test_flags_that_no_table_has_are_named(monkeypatch, diagnosis):
    assert diagnosis.unknown_flags == []
    monkeypatch.setattr(doctor, "unknown_flags", lambda: ["brand_new"])
    changed = doctor.diagnose()
    assert changed.unknown_flags == ["brand_new"]
    assert changed.runnable
    assert "flags of this Megatron that a run refuses, as they are not known here: brand_new" in changed.warnings


def test_something_required_is_missing(monkeypatch):
    diagnosis = with_package(monkeypatch, name="safetensors", found="")
    assert diagnosis.problems == ["safetensors is not installed: pip install 'safetensors'"]
    assert "no run can start here" in printed(diagnosis)


def test_a_missing_optional_package_costs_but_stops_nothing(monkeypatch):
    diagnosis = with_package(monkeypatch, name="matplotlib", found="")
    assert diagnosis.runnable
    assert "without: megasched quickstart can't draw its loss curve" in printed(diagnosis, width=200)


def test_an_old_optional_package_is_a_warning(monkeypatch):
    diagnosis = with_package(monkeypatch, name="transformer-engine", found="1.0")
    assert diagnosis.runnable
    assert any("transformer-engine 1.0 is not supported" in warning for warning in diagnosis.warnings)


def test_two_megatrons_are_a_problem(monkeypatch):
    def mixed():
        raise ConfigError("two Megatrons are mixed")

    monkeypatch.setattr("megasched.cli.installation.find_megatron", mixed)
    assert doctor.diagnose().problems == ["two Megatrons are mixed"]


def test_a_patch_that_does_not_fit_is_a_problem(monkeypatch):
    patch = replace(seams.available()[-1], versions={"megatron-core": ">=0.99"})
    monkeypatch.setattr(seams, "available", lambda: [patch])
    diagnosis = doctor.diagnose()
    assert diagnosis.patches[0].applied == "refused"
    assert not diagnosis.runnable
    assert patch.name in diagnosis.problems[0]


def test_a_patch_that_is_not_needed(monkeypatch):
    patch = replace(seams.available()[-1], unneeded=lambda: "Megatron does it by itself")
    monkeypatch.setattr(seams, "available", lambda: [patch])
    (report,) = doctor.diagnose().patches
    assert (report.applied, report.reason) == ("never", "Megatron does it by itself")


def test_a_wrong_apex_is_warned_of(monkeypatch):
    wrong = Apex(dict.fromkeys(PARTS, False), "/site/apex", "not NVIDIA's apex", "pip uninstall apex")
    monkeypatch.setattr(doctor, "find_apex", lambda: wrong)
    diagnosis = doctor.diagnose()
    assert diagnosis.runnable
    assert diagnosis.warnings == ["apex in /site/apex: not NVIDIA's apex. Remedy: pip uninstall apex"]
    assert "Remedy: pip uninstall apex" in printed(diagnosis)


def test_private_names_of_transformers_are_listed(diagnosis):
    told = diagnosis.to_dict()["transformers_private_names"]
    assert {one["name"]: one["reason"] for one in told} == NAMES
    assert all(one["found"] for one in told)


def test_a_private_name_that_transformers_has_moved_is_a_problem(monkeypatch):
    moved = PrivateName("transformers.somewhere:there", "computes the masks", found=False)
    monkeypatch.setattr(doctor, "private_names", lambda: [moved])
    diagnosis = doctor.diagnose()
    (problem,) = diagnosis.problems
    assert re.fullmatch(
        r"transformers [\d.]+ has moved: transformers\.somewhere:there, which computes the masks", problem
    )
    assert "problem: transformers" in printed(diagnosis)
    wrong = with_package(monkeypatch, name="transformers", found="4.57.0")
    assert [problem for problem in wrong.problems if "moved" in problem] == []


def test_devices_are_listed(diagnosis):
    device = doctor.Device("NVIDIA H200", 139.8, "9.0")
    text = printed(replace(diagnosis, devices=[device]))
    assert "0  NVIDIA H200, 139.8 GiB, capability 9.0" in text
    assert "rehearsal on the CPU" in printed(replace(diagnosis, devices=[]))


def test_lines_fit_into_100_columns(diagnosis):
    assert max(len(line.rstrip()) for line in printed(diagnosis).splitlines()) <= 100


@pytest.fixture
def no_headers(monkeypatch, tmp_path):
    for name in cuda_headers.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cuda_headers, "_nvidia_packages", lambda: [str(tmp_path / "nvidia")])
    monkeypatch.setattr(cuda_headers, "TOOLKIT", tmp_path / "toolkit")
    monkeypatch.setattr(doctor, "_cuda", lambda: ("13.0", []))
    monkeypatch.setattr(doctor, "_import_problem", lambda module: "")


def headers(folder):
    folder.mkdir(parents=True)
    (folder / "cuda_runtime.h").touch()


def test_headers_that_transformer_engine_will_not_find_are_a_warning(monkeypatch, no_headers):
    diagnosis = with_package(monkeypatch, name="transformer-engine", found="2.20.2")
    (warning,) = diagnosis.warnings
    assert warning.startswith(
        "Transformer Engine 2.20.2 compiles its norms at their first call and finds no cuda_"
    )
    assert "NVTE_CUDA_INCLUDE_DIR" in warning
    assert "NVTE_CUDA_INCLUDE_DIR" in printed(diagnosis)
    assert diagnosis.runnable


@pytest.mark.parametrize("place", ["nvidia/cu13/include", "nvidia/cu13", "toolkit/include", "home", "own/include"])
def test_where_transformer_engine_looks_for_headers(monkeypatch, tmp_path, no_headers, place):
    headers(tmp_path / place)
    monkeypatch.setenv("NVTE_CUDA_INCLUDE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert with_package(monkeypatch, name="transformer-engine", found="2.20.2").warnings == []


@pytest.mark.parametrize("devices", [[doctor.Device("NVIDIA H200", 139.8, "9.0")], []])
def test_a_transformer_engine_that_can_not_be_imported_is_told_once(monkeypatch, broken_package, devices):
    """A run would end there; a rehearsal goes without it."""
    monkeypatch.setitem(sys.modules, "transformer_engine", None)  # whatever doctor leaves there goes afterwards
    monkeypatch.delitem(sys.modules, "transformer_engine")
    broken_package("transformer_engine")
    monkeypatch.setattr(doctor, "_cuda", lambda: ("13.0", devices))
    diagnosis = with_package(monkeypatch, name="transformer-engine", found="2.16.0")
    (told,) = diagnosis.problems + diagnosis.warnings
    said = "transformer_engine 2.16.0 can't be imported here: OSError: lib.so: undefined symbol: f."
    assert told.startswith(said)
    assert diagnosis.runnable == (not devices)
    assert all(patch.applied != "refused" for patch in diagnosis.patches)
    assert "apex" not in sys.modules


def test_a_megatron_that_can_not_be_imported_is_one_problem(monkeypatch):
    def refused(patch):
        raise ConfigError("numpy is broken")

    monkeypatch.setattr(registry, "check", refused)
    monkeypatch.setattr(doctor, "_import_problem", lambda module: "numpy is broken")
    assert doctor.diagnose().problems == ["numpy is broken"]


def test_older_ones_bring_their_norms_compiled(monkeypatch, no_headers):
    assert with_package(monkeypatch, name="transformer-engine", found="2.19.0").warnings == []
