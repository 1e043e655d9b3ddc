"""The collector is as it was after a pause, whatever happened in it."""

from __future__ import annotations

import gc

import pytest

from megasched.collector import collector_paused


def test_nothing_is_collected_until_the_outermost_pause_ends():
    with collector_paused():
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_ends_it():
    with pytest.raises(ValueError, match="mine"), collector_paused():
        raise ValueError("mine")
    assert gc.isenabled()


def test_one_that_is_off_stays_off():
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
