"""The C++ helpers of datasets: Megatron ends the process without the patch, in a wheel and in a checkout."""

import os
import subprocess
import sys
import sysconfig

import pytest

from megasched.errors import ConfigError
from megasched.patches import apply, dataset_helpers, undo

# In the form of Megatron's: these variables, and the python3 of PATH for the headers.
MAKEFILE = """\
CXXFLAGS += -O0 -shared -std=c++17 -fPIC
CPPFLAGS += $(shell python3 -m pybind11 --includes)
LIBNAME = helpers_cpp
LIBEXT = $(shell python3-config --extension-suffix)
OUT = $(LIBNAME)$(LIBEXT)
default: $(OUT)
$(OUT): helpers.cpp
\t$(CXX) $(CXXFLAGS) $(CPPFLAGS) $< -o $@
"""
HELPERS = """\
#include <pybind11/pybind11.h>
PYBIND11_MODULE(helpers_cpp, module) { module.def("seven", [] { return 7; }); }
"""


def compile_with_and_without():
    import megatron.core.datasets.utils as utils

    undo("dataset_helpers")
    try:
        utils.compile_helpers()
        without = "compiled"
    except SystemExit as error:
        without = error.code
    assert apply("dataset_helpers")
    utils.compile_helpers()
    from megatron.core.datasets import helpers_cpp

    return without, callable(helpers_cpp.build_sample_idx_int32), dataset_helpers._unneeded()


def test_the_fault_is_still_there_without_the_patch(ranks):
    """In the wheel; a checkout's, which depends on PATH, is below."""
    ((without, *patched),) = ranks.run(1, compile_with_and_without)
    assert patched == [True, None]
    if not (dataset_helpers._helpers_folder() / "Makefile").is_file():
        assert without == 1


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder of helpers as a checkout has it, where the python3 of PATH has no pybind11."""
    folder, programs = tmp_path / "datasets", tmp_path / "bin"
    for each in (folder, programs):
        each.mkdir()
    (folder / "Makefile").write_text(MAKEFILE)
    (folder / "helpers.cpp").write_text(HELPERS)
    for name in ("python3", "python3-config"):
        (programs / name).write_text("#!/bin/sh\nexit 1\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(dataset_helpers, "_helpers_folder", lambda: folder)
    return folder


def library(folder):
    return folder / f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"


def test_a_checkouts_makefile_is_carried_out_by_this_interpreter(checkout):
    bare = subprocess.run(["make", "-C", checkout], capture_output=True)
    assert bare.returncode != 0  # the fault
    assert dataset_helpers._unneeded() is None
    dataset_helpers.compiled()
    assert [path.name for path in checkout.glob("helpers_cpp*")] == [library(checkout).name]
    code = "import helpers_cpp; print(helpers_cpp.seven())"
    ran = subprocess.run([sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True, check=True)
    assert ran.stdout == "7\n"


def test_what_is_compiled_stays_until_its_source_is_newer(checkout):
    library(checkout).write_text("compiled")
    dataset_helpers.compiled()
    assert library(checkout).read_text() == "compiled"
    os.utime(checkout / "helpers.cpp", (2**31, 2**31))
    dataset_helpers.compiled()
    assert library(checkout).read_bytes()[1:4] == b"ELF"


def test_a_compiler_that_fails_is_told_and_leaves_nothing(checkout):
    (checkout / "helpers.cpp").write_text("this is no C++;")
    with pytest.raises(
        ConfigError, match=r"can't be compiled; g\+\+, make, the headers.*\n(.*\n)*.*this is no C\+\+"
    ):
        dataset_helpers.compiled()
    assert not list(checkout.glob("helpers_cpp*"))


def test_a_broken_install_keeps_megatrons_own_message(checkout):
    (checkout / "Makefile").unlink()
    assert "neither a Makefile nor compiled helpers_cpp" in dataset_helpers._unneeded()
