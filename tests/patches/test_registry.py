"""Applying patches by name: once, only where they fit, with errors that name the versions that work."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megasched.attributes import set_attribute
from megasched.errors import ConfigError
from megasched.patches import registry
from megasched.patches.registry import Patch
from megasched.trainer import seams
from tests.patches.mended import MENDED_IN


def size(width, height):
    return width * height


@pytest.fixture
def plain(monkeypatch):
    """Registers one patch of `shop:size`, with the fields that a test changes; returns the patched module."""
    shop = ModuleType("shop")
    shop.size = size
    monkeypatch.setitem(sys.modules, "shop", shop)
    monkeypatch.setattr(registry, "_undos", {})

    def register(**changes):
        fields = {
            "name": "plain",
            "targets": ("shop:size",),
            "versions": {"pytest": ">=1"},
            "why": "shop.py:1 is wrong",
            "change": lambda factor=0: set_attribute("shop:size", lambda width, height: factor),
            "signature": {"shop:size": ("width", "height")},
        }
        patch = Patch(**{**fields, **changes})
        monkeypatch.setattr(registry, "_patches", lambda: {patch.name: patch})
        return shop

    return register


def test_apply_and_undo(plain):
    shop = plain()
    assert registry.active() == []
    assert registry.apply("plain") is True
    assert registry.active() == ["plain"]
    assert shop.size(2, 3) == 0
    registry.undo("plain")
    assert shop.size(2, 3) == 6
    assert registry.active() == []


def test_options_reach_the_change(plain):
    shop = plain()
    registry.apply("plain", factor=7)
    assert shop.size(2, 3) == 7


def test_twice_is_once(plain):
    shop = plain()
    registry.apply("plain")
    first = shop.size
    assert registry.apply("plain") is True
    assert shop.size is first
    registry.undo("plain")
    registry.undo("plain")
    assert shop.size is size


def test_a_patch_that_is_not_needed_changes_nothing(plain):
    shop = plain(unneeded=lambda: "mended upstream")
    assert registry.apply("plain") is False
    assert registry.active() == []
    assert shop.size is size


def test_an_older_version_than_the_range_is_refused(plain):
    shop = plain(versions={"pytest": ">=99"})
    with pytest.raises(ConfigError, match=r"can't be applied to pytest .*known to work with pytest >=99"):
        registry.apply("plain")
    assert shop.size is size


def test_a_newer_version_is_tried_by_its_targets(plain):
    """Whether it may run at all was asked before."""
    shop = plain(versions={"pytest": ">=1,<2"})
    assert registry.apply("plain") is True
    assert shop.size(2, 3) == 0
    registry.undo("plain")
    shop.size = lambda width: width
    with pytest.raises(ConfigError, match="has no parameter height any more"):
        registry.apply("plain")


def test_a_missing_package_is_named(plain):
    plain(versions={"no-such-package": ">=1"})
    with pytest.raises(ConfigError, match="no-such-package is not installed"):
        registry.apply("plain")


def test_a_target_that_moved_is_named_with_the_versions_that_work(plain):
    plain(targets=("shop:size", "shop:weight"))
    with pytest.raises(ConfigError, match=r"shop:weight: no such attribute. Versions known to work: pytest >=1"):
        registry.apply("plain")


def test_a_parameter_that_went_is_named(plain):
    plain(signature={"shop:size": ("width", "depth")})
    with pytest.raises(ConfigError, match="shop:size has no parameter depth any more"):
        registry.apply("plain")


@pytest.mark.parametrize("function", [registry.apply, registry.undo])
def test_an_unknown_name_lists_the_known_ones(plain, function):
    plain()
    with pytest.raises(ConfigError, match="no patch is called 'fancy'; there are: plain"):
        function("fancy")


def test_every_patch_says_what_why_and_for_which_versions():
    for patch in seams.available():
        assert ".py:" in patch.why, patch.name
        assert patch.versions, patch.name
        assert all(target.count(":") == 1 for target in patch.targets), patch.name
        assert set(patch.signature) <= set(patch.targets), patch.name


def test_listing_them_is_light():
    code = (
        "import sys; from megasched.trainer.seams import available; assert len(available()) > 15; "
        "print([name for name in ('torch', 'megatron', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


# Patch of a fault -> the file of tests in which it is shown without the patch, and the test.
SHOWN = {
    "adamw_resume": ("test_adamw_resume", "test_each_parameter_counts_its_own_steps"),
    "float32_numbers": ("test_float32", ""),
    "float32_places": ("test_float32", ""),
    "results_queue": ("test_results_queue", "test_it_ends_with_its_rank_and_would_not_without_the_patch"),
}
EMULATION = {"host_cuda"}  # no fault
STILL_THERE = "test_the_fault_is_still_there_without_the_patch"


def test_every_fault_is_shown_by_a_test_and_written_down():
    folder = Path(__file__).parent
    written = (folder.parents[1] / "docs" / "upstream.md").read_text()
    for name in set(registry._DECLARED["megasched.patches"]) - EMULATION:
        file, test = SHOWN.get(name, (f"test_{name}", ""))
        assert f"def {test or STILL_THERE}(" in (folder / f"{file}.py").read_text(), name
        assert f"`{name}` | there" in written, name
        assert f"tests/patches/{file}.py" in written, name
        assert ("| mended |" in next(line for line in written.splitlines() if f"`{name}`" in line)) is (
            name in MENDED_IN
        )
