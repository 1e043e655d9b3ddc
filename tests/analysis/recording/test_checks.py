"""Checks of values in a definition's code, which fail in a trial, and are answered so that it goes on."""

import pytest
import torch
from torch import nn

from megasched.analysis.recording.checks import pass_checks
from megasched.analysis.recording.meta_call import PASSED, meta_copy
from megasched.analysis.recording.recorder import record_tape
from megasched.analysis.recording.sites import site_of
from megasched.analysis.trials.ways import find_ways
from megasched.errors import ScheduleError


@pytest.fixture(autouse=True)
def _as_before():
    """Forgets what a test has found out, for the tests that follow in this process."""
    before = set(PASSED)
    PASSED.clear()
    yield
    PASSED.clear()
    PASSED.update(before)


class By(nn.Module):
    """Has some code for its forward: [b, s, 4] -> the same."""

    def __init__(self, code):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.code = code

    def forward(self, x):
        return self.code(x * self.weight)


def example():
    return {"x": torch.empty(1, 2, 4, device="meta")}


def raises(x):
    if not (x < 9).all():
        raise ValueError("beyond")
    return x + 1


def asserts(x):
    assert (x < 9).all(), f"the largest is {x.max().item()}"
    return x + 1


def is_below(x):
    return bool((x < 9).all())


def by_a_function(x):
    if not is_below(x):
        raise ValueError(x.max().item())
    return x + 1


def by_equality(x):
    if x.sum().item() == 0:
        raise ValueError("nothing")
    return x + 1


def twice(x):
    return raises(asserts(x) - 1)


def distribution(x):
    normal = torch.distributions.Normal(x.mean(-1, keepdim=True), x.std(-1, keepdim=True))
    return torch.relu(x - normal.icdf(torch.tensor(0.9)))


@pytest.fixture
def checked():
    """Has torch.distributions check what it is given, as it does until something is compiled in a process."""
    before = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(True)
    yield
    torch.distributions.Distribution.set_default_validate_args(before)


@pytest.mark.parametrize("code", [raises, asserts, by_a_function, by_equality, twice, distribution])
def test_a_trial_passes_them(code, checked):
    tape = record_tape(meta_copy(By(code)), example())
    assert tape.output.shape == (1, 2, 4)
    assert {site_of(lines).file for lines in PASSED} == {__file__}


def test_only_what_its_function_has_asked_is_answered_anew():
    def fails(x):
        raise TypeError("of no value")

    def code(x):
        x = x + 1 if (x < 5).all() else x + 2
        return fails(x)

    with pytest.raises(ScheduleError, match="TypeError: of no value"):
        record_tape(meta_copy(By(code)), example())
    assert not PASSED


def test_what_fails_with_either_answer_is_refused_in_its_own_words():
    def code(x):
        if (x < 9).all():
            raise ValueError("all below")
        raise ValueError("one above")

    with pytest.raises(ScheduleError, match="ValueError: one above"):
        record_tape(meta_copy(By(code)), example())
    assert not PASSED


def shared(x):
    if not is_below(x):
        raise ValueError("beyond")
    return x - 2 if is_below(x * 3) else x * 5


def counted(x):
    count = x.sum().item()
    if count == 0:
        raise ValueError("nothing")
    return x - 2 if count > 5 else x * 5


@pytest.mark.parametrize("code", [shared, counted])
def test_other_ways_are_looked_at_beside_a_check(code):
    model = By(code)
    assert record_tape(meta_copy(model), example()).output.shape == (1, 2, 4)
    ways = find_ways(model, example())
    assert len(ways.others) == 1
    assert len(ways.deciding) == 1


class Strict(nn.Module):
    def __init__(self, strict):
        super().__init__()
        self.weight, self.strict = nn.Parameter(torch.ones(4)), strict

    def forward(self, x):
        below = bool((x < 9).all())
        if self.strict and not below:
            raise ValueError("beyond")
        return x * self.weight if below else x + self.weight


@pytest.mark.parametrize("strict", [[True, True], [True, False]])
def test_it_is_a_check_in_every_module_or_none(strict):
    """Where one module goes on with either answer, no way past the other's check shows what that one does."""
    model = nn.Sequential(*map(Strict, strict))
    inputs = {"input": torch.empty(1, 2, 4, device="meta")}
    assert pass_checks(model, inputs) is all(strict)
    assert bool(PASSED) is all(strict)


def test_a_hook_of_the_whole_model_checks_before_it_runs():
    def check(module, args, kwargs):
        if not is_below(kwargs["x"]):
            raise ValueError("beyond")

    model = By(lambda x: x + 1)
    model.register_forward_pre_hook(check, with_kwargs=True)
    assert pass_checks(model, example())
    assert len(PASSED) == 1
