"""Calls made ahead: their order, how far ahead, and what happens when one fails or nobody asks for more."""

import threading
from functools import partial

import pytest

from megasched.weights.progress import DEPTH, ahead
from tests.waiting import until


def test_the_order_is_that_of_the_calls_and_a_thread_makes_them():
    def call(number):
        return number, threading.current_thread().name.partition("_")[0]

    assert list(ahead(partial(call, number) for number in range(10))) == [(n, "ahead") for n in range(10)]


@pytest.mark.parametrize("count", range(DEPTH + 2))
def test_few_calls(count):
    assert list(ahead(partial(int, number) for number in range(count))) == list(range(count))


def test_no_more_is_held_than_said():
    begun, made = [], []

    def calls():
        for number in range(100):
            begun.append(number)
            yield partial(made.append, number)

    found = ahead(calls())
    next(found)
    until(lambda: len(made) >= DEPTH + 1)
    found.close()
    assert len(begun) == len(made) == DEPTH + 1
    assert not any(thread.name.startswith("ahead") for thread in threading.enumerate())


def test_an_error_comes_in_its_turn_and_nothing_is_begun_after_it():
    made = []

    def call(number):
        if number == 3:
            raise OSError("no such block")
        made.append(number)
        return number

    found = ahead(partial(call, number) for number in range(100))
    assert [next(found) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="no such block"):
        next(found)
    assert max(made) <= 3 + DEPTH
