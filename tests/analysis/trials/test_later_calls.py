"""Code that goes by which call it is: a plan looks at the first alone, so a run of several ranks is refused."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megasched.analysis.trials.later_calls import why_calls_differ
from megasched.errors import ScheduleError
from megasched.language.parallel_dims import ParallelDims
from megasched.trainer.session import open_session
from tests import remote

pytestmark = pytest.mark.filterwarnings("ignore:.*itertools:DeprecationWarning")  # it copies one that counts
COUNTED = 0
INPUTS = {"x": torch.empty(1, 2, 4, device="meta")}


class Code(nn.Module):
    """[b, s, 4] -> the same."""

    calls = 0

    def __init__(self, forward=None):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.code = forward
        self.n, self.ready, self.seen = 0, False, []
        self.stats = SimpleNamespace(by_name={"calls": [0]})
        self.places = itertools.count()
        self.own = random.Random(0)
        self.drawn = torch.Generator()

    def forward(self, x):
        return self.code(self, self.inner(x))


def warms_up(self, x):
    self.n += 1
    return x.softmax(-1) if self.n > 100 else x


def every_other(self, x):
    self.n += 1
    return x.softmax(-1) if self.n % 2 else x


def by_a_number(self, x):
    self.n += 1
    return x * (1 + self.n)


def sets_up(self, x):
    if not self.ready:
        x, self.ready = x - x.mean(), True
    return x


def on_its_class(self, x):
    type(self).calls += 1
    return x.exp() if type(self).calls > 50 else x


def in_a_global(self, x):
    global COUNTED
    COUNTED += 1
    return x.exp() if COUNTED > 50 else x


def deep_inside(self, x):
    self.stats.by_name["calls"][0] += 1
    return x.exp() if self.stats.by_name["calls"][0] > 50 else x


def by_a_list(self, x):
    self.seen.append(x.shape)
    return x.exp() if len(self.seen) > 2 else x


def by_a_default(self, x, seen=[]):  # noqa: B006
    seen.append(1)
    return x.exp() if len(seen) > 2 else x


def on_itself(self, x):
    on_itself.calls = getattr(on_itself, "calls", 0) + 1
    return x.exp() if on_itself.calls > 50 else x


def counted_by_python(self, x):
    return x.exp() if next(self.places) > 50 else x


def draws_of_its_own(self, x):
    return x.exp() if self.own.random() < 1e-9 else x


def draws_of_its_own_tensors(self, x):
    return x * torch.rand(4, generator=self.drawn, device="cpu").sum().item()


def in_a_closure():
    n = 0

    def code(self, x):
        nonlocal n
        n += 1
        return x.exp() if n > 50 else x

    return code


def fails_later(self, x):
    self.n += 1
    return x[self.n - 1]


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (warms_up, "n"),
        (every_other, "n"),
        (by_a_number, "n"),
        (sets_up, "ready"),
        (on_its_class, r"tests\.analysis\.trials\.test_later_calls\.Code\.calls"),
        (in_a_global, r"tests\.analysis\.trials\.test_later_calls\.COUNTED"),
        (deep_inside, r"stats\.by_name\['calls'\]\[0\]"),
        (by_a_list, r"len\(seen\)"),
        (by_a_default, r"len\(code default 0\)"),
        (on_itself, r"code\.calls"),
        (in_a_closure(), "code n"),
        (fails_later, "n"),
        (counted_by_python, "places"),
        (draws_of_its_own, "own"),
        (draws_of_its_own_tensors, "drawn"),
    ],
)
def test_what_tells_calls_apart_is_named(code, name):
    problem = why_calls_differ(Code(code), INPUTS)
    assert problem is not None
    with pytest.raises(ScheduleError, match=rf"\b{name}"):
        raise ScheduleError(problem)


def counts_only(self, x):
    self.n += 1
    type(self).calls += 1
    self.seen.append(x)
    return x + 1


def keeps_a_table(self, x):
    if not self.stats.by_name.get("table"):
        self.stats.by_name["table"] = [torch.arange(4)]
    return x * self.stats.by_name["table"][0]


def test_what_is_only_counted_is_no_hindrance():
    for code in (counts_only, keeps_a_table):
        assert why_calls_differ(Code(code), INPUTS) is None


def test_nothing_of_it_is_left():
    model = Code(in_a_global)
    before = COUNTED, Code.calls
    why_calls_differ(model, INPUTS)
    why_calls_differ(Code(on_its_class), INPUTS)
    assert (COUNTED, Code.calls, model.n) == (*before, 0)


WARM_UP = """
from transformers.models.llama.modeling_llama import LlamaMLP


class Mlp(LlamaMLP):
    calls = 0

    def forward(self, x):
        self.calls += 1
        h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(h.softmax(-1) if self.calls > 1000 else h)
"""


@pytest.mark.parametrize("size", ["tensor_model", "pipeline_model", "context", "data"])
def test_several_ranks_are_refused(size, tmp_path):
    folder = remote.write(tmp_path / "model", WARM_UP)
    assert open_session("auto", folder, ParallelDims(), trust_remote_code=True).plan
    name = "data_parallel_size" if size == "data" else f"{size}_parallel_size"
    session = open_session("auto", folder, ParallelDims(**{name: 2}), trust_remote_code=True)
    why = r"which call it is: it changes model\.layers\.0\.mlp\.calls"
    with pytest.raises(ScheduleError, match=why) as caught:
        _ = session.plan
    assert caught.value.problems[0].module == "model.layers.0.mlp"
