"""Telling NVIDIA's apex from what goes by its name; nothing called apex is ever imported."""

import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from megasched.cli.apex import PARTS, find_apex

RAISES = "raise RuntimeError('apex must not be imported to decide')\n"


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    """The only folder on ``sys.path``: what this machine has installed does not matter."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def package(site: Path, *folders: str) -> Path:
    apex = site / "apex"
    for folder in ("", *folders):
        (apex / folder).mkdir(parents=True)
        (apex / folder / "__init__.py").write_text(RAISES)
    return apex


def compiled(site: Path, name: str) -> None:
    (site / f"{name}{EXTENSION_SUFFIXES[0]}").touch()


def test_none(site):
    apex = find_apex()
    assert (apex.folder, apex.problem) == ("", "")
    assert apex.parts == dict.fromkeys(PARTS, False)


def test_an_unrelated_package_is_named_and_not_imported(site):
    folder = package(site)
    apex = find_apex()
    assert apex.folder == str(folder)
    assert "not NVIDIA's apex" in apex.problem
    assert str(folder) in apex.remedy
    assert "apex" not in sys.modules


def test_a_mere_folder(site):
    (site / "apex").mkdir()
    assert "not NVIDIA's apex" in find_apex().problem


def test_what_pip_installed_is_uninstalled_by_pip(site):
    package(site)
    record = site / "apex-0.9.10.dev0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.9.10.dev0\n")
    (record / "RECORD").write_text("apex/__init__.py,,\n")
    assert find_apex().remedy == "pip uninstall apex"


def test_nvidias_parts_are_told_one_by_one(site):
    package(site, "optimizers", "normalization", "multi_tensor_apply")
    compiled(site, "amp_C")
    apex = find_apex()
    assert apex.problem == ""
    assert {name for name, here in apex.parts.items() if here} == {"amp_C"}


def test_nvidias_python_alone_is_no_use(site):
    package(site, "optimizers", "normalization", "multi_tensor_apply")
    assert "without its compiled parts" in find_apex().problem


def test_python_by_the_name_of_a_compiled_part_is_not_it(site):
    (site / "amp_C.py").write_text(RAISES)
    (site / "fast_layer_norm").mkdir()
    assert find_apex().parts == dict.fromkeys(PARTS, False)
