"""Applying patches by name: once, only where they fit, with errors that name the versions that work."""

import subprocess
import sys
from types import ModuleType

import pytest

from megasched.attributes import set_attribute
from megasched.errors import ConfigError
from megasched.patches import registry
from megasched.patches.registry import Patch
from megasched.trainer import seams


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
