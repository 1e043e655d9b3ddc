"""Modules that documents named where they stood before."""

from __future__ import annotations

import sys

import pytest

import megasched
from megasched._moved import MOVED

NAMES = {"megasched.layout": "Layout", "megasched.weights.hf_folder": "HFFolder"}


@pytest.mark.parametrize(("old", "name"), NAMES.items())
def test_they_can_be_imported_and_say_so(old, name, monkeypatch):
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=f"{old} is {MOVED[old]} now"):
        module = __import__(old, fromlist=[name])
    assert getattr(module, name) is getattr(megasched, name)


def test_all_of_them_are_tried_here():
    assert NAMES.keys() == MOVED.keys()


def test_what_there_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError):
        __import__("megasched.no_such_module")
