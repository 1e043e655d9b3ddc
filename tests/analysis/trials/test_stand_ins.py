"""Code that sees which objects a run has in the places of a definition's: HF's numbers are due, or a refusal."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megasched.analysis.trials import stand_ins
from megasched.errors import ScheduleError
from megasched.language.parallel_dims import ParallelDims
from megasched.trainer.session import open_session
from megasched.verify.parity import LAYOUTS
from tests import remote
from tests.parity.steps import assert_equal, step_of_own_code
from tests.ways import mlp

INPUTS = {"x": torch.empty(1, 2, 4, device="meta")}
TABLE: dict[object, float] = {}
WEAK: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
REGISTRY: list[nn.Module] = []


def why_seen(model, inputs, replaced, *, regions):
    unaltered = partial(stand_ins.trace_unaltered, model, inputs)
    return stand_ins.why_seen(model, inputs, unaltered, replaced, regions=regions)


def sizes_read(model, inputs, shapes):
    return stand_ins.sizes_read(model, inputs, partial(stand_ins.trace_unaltered, model, inputs), shapes)


class Code(nn.Module):
    """[b, s, 4] -> the same."""

    def __init__(self, code, setup=lambda self: None):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)
        self.code = code
        setup(self)

    def forward(self, x):
        return self.outer(self.code(self, x))


def plain(self, x):
    return self.inner(x)


def by_a_mark(self, x):
    return self.inner(x) * getattr(self.inner, "mark", 1.0)


def by_out_features(self, x):
    return self.inner(x) * self.inner.out_features


def by_modules(self, x):
    return self.inner(x) * len(list(self.modules())) * len(self.state_dict())


SEEN = {
    "isinstance": (lambda self, x: self.inner(x) * isinstance(self.inner, nn.Linear), None, "does something else"),
    "type": (lambda self, x: self.inner(x).exp() if type(self.inner) is nn.Linear else x, None, "something else"),
    "repr": (lambda self, x: self.inner(x) * len(repr(self)), None, "does something else"),
    "a list of modules": (
        lambda self, x: self.all[0](x),
        lambda self: setattr(self, "all", [self.inner]),
        "is called",
    ),
    "a bound method": (
        lambda self, x: self.run(x),
        lambda self: setattr(self, "run", partial(self.inner.forward)),
        "holds inner.weight elsewhere",
    ),
    "a list of weights": (
        lambda self, x: nn.functional.linear(x, self.all[0]),
        lambda self: setattr(self, "all", [self.inner.weight]),
        "holds inner.weight elsewhere",
    ),
    "a tensor made of a weight": (
        lambda self, x: self.inner(x) * self.all["scale"],
        lambda self: setattr(self, "all", {"scale": self.inner.weight.detach().mean()}),
        "reads all, a tensor that its class makes of weights",
    ),
    "a weak reference": (
        lambda self, x: nn.functional.linear(x, self.other().weight),
        lambda self: setattr(self, "other", weakref.ref(self.inner)),
        "holds inner.weight elsewhere",
    ),
    "a global list": (lambda self, x: REGISTRY[-1](x), lambda self: REGISTRY.append(self.inner), "inner.weight"),
    "a table by modules": (
        lambda self, x: self.inner(x) * TABLE.get(self, 1.0),
        lambda self: TABLE.update({self: 0.5}),
        "looks up a module or a parameter in tests.analysis.trials.test_stand_ins.TABLE",
    ),
    "a table on the module": (
        lambda self, x: self.inner(x) * self.by.get(self.inner, 1.0),
        lambda self: setattr(self, "by", {self.inner: 0.5}),
        "does something else",
    ),
    "a table by identity": (
        lambda self, x: self.inner(x) * self.by.get(id(self.inner), 1.0),
        lambda self: setattr(self, "by", {id(self.inner): 0.5}),
        "looks up a module or a parameter in by",
    ),
    "a weak table": (
        lambda self, x: self.inner(x) * WEAK.get(self.inner, 1.0),
        lambda self: WEAK.update({self.inner: 0.5}),
        "in tests.analysis.trials.test_stand_ins.WEAK",
    ),
    "an attribute of its class": (
        lambda self, x: self.inner(x) * self.inner.extra_repr().count("="),
        None,
        "fails in a trial call|does something else",
    ),
}


@pytest.fixture(autouse=True)
def _empty():
    yield
    TABLE.clear()
    REGISTRY.clear()


@pytest.mark.parametrize(("code", "setup", "why"), SEEN.values(), ids=SEEN)
def test_what_sees_them_is_refused(code, setup, why):
    with torch.device("meta"):
        model = Code(code, setup or (lambda self: None))
    problem = why_seen(model, INPUTS, ["inner", "outer"], regions=False)
    assert problem is not None
    with pytest.raises(ScheduleError, match=why):
        raise ScheduleError(problem)


@pytest.mark.parametrize("code", [plain, by_a_mark, by_out_features, by_modules])
def test_what_does_not_is_let_through(code):
    model = Code(code, lambda self: setattr(self.inner, "mark", 0.5)).to("meta")
    assert why_seen(model, INPUTS, ["inner", "outer"], regions=True) is None


def test_a_table_of_other_things_is_no_hindrance():
    model = Code(plain, lambda self: setattr(self, "by", {1: 0.5, "inner": self.inner}))
    assert why_seen(model.to("meta"), INPUTS, ["inner"], regions=True) is None


SIZES = {
    "shape": lambda self, x: self.inner(x) / self.inner.weight.shape[0],
    "size": lambda self, x: self.inner(x) / self.inner.weight.size(0),
    "numel": lambda self, x: self.inner(x) / sum(p.numel() for p in self.parameters()),
    "length": lambda self, x: self.inner(x) / len(self.inner.weight),
}


@pytest.mark.parametrize("code", SIZES.values(), ids=SIZES)
def test_reads_of_sizes_are_seen(code):
    shapes = {"inner": {"weight": (2, 4)}}
    assert sizes_read(Code(code).to("meta"), INPUTS, shapes) == {"inner"}
    assert sizes_read(Code(plain).to("meta"), INPUTS, shapes) == set()
    assert sizes_read(Code(by_out_features).to("meta"), INPUTS, shapes) == set()


def calls_itself(self, x):
    self.depth = getattr(self, "depth", 0) + 1
    y = self.inner(x) + (self(x) if self.depth < 2 else 0)
    self.depth -= 1
    return y


def test_a_call_inside_of_its_own_call_is_refused_where_there_are_regions():
    model = Code(calls_itself).to("meta")
    assert why_seen(model, INPUTS, ["inner"], regions=False) is None
    problem = why_seen(model, INPUTS, ["inner"], regions=True)
    assert problem is not None
    assert "called again inside of its own call" in problem.what


def in_threads(self, x):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(self.inner, x).result()


def in_a_thread(self, x):
    made = []
    thread = threading.Thread(target=lambda: made.append(self.inner(x)))
    thread.start()
    thread.join()
    return made[0]


@pytest.mark.parametrize("code", [in_threads, in_a_thread])
def test_threads_are_refused_where_there_are_several_ranks(code):
    model = Code(code).to("meta")
    problem = why_seen(model, INPUTS, [], regions=True)
    assert problem is not None
    assert problem.what.startswith("its code runs in threads")


def by_world_size(self, x):
    ready = dist.is_available() and dist.is_initialized()
    return self.inner(x) / (dist.get_world_size() if ready else 1)


def by_rank(self, x):
    return self.inner(x) * (1 + int(os.environ.get("RANK", "0")))


def by_another_variable(self, x):
    return self.inner(x) * len(os.environ.get("HOME", ""))


ASKED = {by_world_size: "torch.distributed", by_rank: "the environment variable RANK"}


@pytest.mark.parametrize(("code", "asked"), ASKED.items(), ids=ASKED.values())
def test_code_that_asks_for_its_process_is_refused(code, asked):
    problem = why_seen(Code(code).to("meta"), INPUTS, ["inner"], regions=False)
    assert problem is not None
    assert problem.what.startswith(f"its code asks {asked} (test_stand_ins.py:")
    assert why_seen(Code(by_another_variable).to("meta"), INPUTS, ["inner"], regions=False) is None


def imports_more(self, x):

    return self.inner(x)


def test_an_import_in_a_forward_asks_nothing(monkeypatch):
    """Which modules are there already is another matter in each process."""
    monkeypatch.delitem(sys.modules, "torch.distributed.constants")
    assert why_seen(Code(imports_more).to("meta"), INPUTS, ["inner"], regions=False) is None


def by_its_dtype(self, x):
    return self.inner(x).to(self.outer.weight.dtype)


def by_its_size(self, x):
    return self.inner(x) / self.inner.weight.shape[0]


def clips(self, x):
    self.outer.weight.data.clamp_(-1, 1)
    return self.inner(x)


@pytest.mark.parametrize(("code", "read"), [(by_its_dtype, set()), (by_its_size, {"inner"}), (clips, set())])
def test_only_what_goes_by_the_size_of_a_weight_wants_it_whole(code, read):
    shapes = {"inner": {"weight": (2, 4), "bias": (2,)}, "outer": {"weight": (4, 2)}}
    assert sizes_read(Code(code).to("meta"), INPUTS, shapes) == read


def freezes(self, x):
    self.inner.weight.requires_grad_(False)
    y = self.inner(x)
    self.inner.weight.requires_grad = True
    return y


def sets_data(self, x):
    before = self.inner.weight.data
    self.inner.weight.data = before * 0.5
    y = self.inner(x)
    self.inner.weight.data = before
    return y


@pytest.mark.parametrize(("code", "what"), [(freezes, "requires_grad"), (sets_data, "the data")])
def test_what_is_done_to_parameters_by_no_operation_is_refused(code, what):
    problem = why_seen(Code(code).to("meta"), INPUTS, ["inner"], regions=False)
    assert problem is not None
    assert problem.what == f"its forward sets {what} of a parameter"


HALVED = "h = h / self.up_proj.weight.shape[0]\nh = h * getattr(self.up_proj, 'mark', 1.0)"
MARKED = """
Other = Mine


class Mine(Other):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.up_proj.mark = 0.5
"""


def test_sizes_and_marks_of_linears_are_the_definitions(ranks, tmp_path):
    assert_equal(step_of_own_code(ranks, remote.write(tmp_path / "one", mlp(HALVED) + MARKED), LAYOUTS["tp2"]))


def test_one_rank_is_refused(tmp_path):
    folder = remote.write(tmp_path / "model", mlp("h = h * isinstance(self.up_proj, nn.Linear)"))
    with pytest.raises(ScheduleError, match="where other objects stand") as raised:
        _ = open_session("auto", folder, ParallelDims(), trust_remote_code=True).plan
    assert raised.value.problems[0].module == "model.layers.0.mlp"
