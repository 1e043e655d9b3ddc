"""What other packages warn of, in a run and in the processes that it spawns."""

from __future__ import annotations

import subprocess
import sys
import warnings
from importlib import import_module

import pytest
import torch

from megasched.errors import ConfigError
from megasched.imports import command_imports, named_package, quiet_run

WARN = "import warnings; warnings.warn('Apex is not installed. Falling back'); warnings.warn('mine')"


@pytest.mark.parametrize(("theirs", "said"), [(None, ["mine"]), ("default", ["Apex is not installed", "mine"])])
def test_spawned_processes_are_as_quiet_unless_their_user_wants_it_otherwise(monkeypatch, theirs, said):
    monkeypatch.setenv("PYTHONWARNINGS", theirs or "")
    if theirs is None:
        monkeypatch.delenv("PYTHONWARNINGS")
    with warnings.catch_warnings():
        quiet_run()
    done = subprocess.run([sys.executable, "-c", WARN], capture_output=True, text=True, check=True)
    lines = [line for line in done.stderr.splitlines() if "UserWarning: " in line]
    assert len(lines) == len(said)
    for line, words in zip(lines, said, strict=True):
        assert words in line


def test_a_command_imports_functions_uncompiled():
    def function(x):
        return x

    before = torch.compile
    with command_imports():
        assert torch.compile(function) is torch.compile(dynamic=True)(function) is function
    assert torch.compile is before


def test_a_package_that_can_not_be_imported_is_named(broken_package):
    broken_package("some_kernels")
    with pytest.raises(ConfigError) as caught, named_package():
        import_module("some_kernels")
    assert str(caught.value) == (
        "some_kernels 2.16.0 can't be imported here: OSError: lib.so: undefined symbol: f. Install one that was "
        "made for the Python, torch and CUDA libraries that are installed, or uninstall it"
    )


def test_what_is_nobodys_but_ours_stays_as_it_is():
    with pytest.raises(ModuleNotFoundError, match="no_such_module"), named_package():
        import_module("no_such_module")
    with pytest.raises(ZeroDivisionError), named_package():
        find_package("")
    with pytest.raises(RuntimeError), named_package():  # of a package that was imported long ago
        torch.ones(2).view(3)
    with pytest.raises(TypeError), named_package():
        torch.nn.functional.relu(None)


def find_package(name):
    return 1 // len(name)
