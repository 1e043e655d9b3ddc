"""Ways through a definition's code: what is looked at beside the one of a trial, and what a plan makes of it."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import nn

from megasched.analysis.tp import joined_ways
from megasched.analysis.tp.facts import TpFacts
from megasched.analysis.trials.ways import find_ways
from megasched.errors import ScheduleError
from megasched.language.parallel_dims import ParallelDims
from megasched.trainer.session import open_session
from tests import remote
from tests.ways import BY_LENGTH, BY_MODE, BY_VALUES, SEES_TENSORS_OF_LISTS

LAYOUTS = {
    "tp2": ParallelDims(tensor_model_parallel_size=2),
    "sp2": ParallelDims(tensor_model_parallel_size=2, sequence_parallel=True),
    "cp2": ParallelDims(context_parallel_size=2),
    "pp2": ParallelDims(pipeline_model_parallel_size=2),
}


class By(nn.Module):
    """Has some code for its forward: [b, s, 4] -> the same."""

    def __init__(self, code):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.code = code

    def forward(self, x):
        return self.code(x * self.weight)


def ways_of(code, length=None):
    inputs_of = lambda n: {"x": torch.empty(1, n, 4, device="meta")}  # noqa: E731
    return find_ways(By(code), inputs_of(2), inputs_of, length)


def above(x):
    return x - 1 if x.max() > 0.5 else x


def below(x):
    return x - 1 if x.min().item() < -0.5 else x


def both(x):
    if x.max() > 0.5:
        return x - 1 if x.min().item() < -0.5 else x + 1
    return x


def checked(x):
    if x.isnan().any():
        raise ValueError
    return x


def warned(x):
    if x.isnan().any():
        print("mind")
    return x


def scaled(x):
    return x * x.max().item()


def none_there(x):
    return x if len(x[x > 0]) else x.clone() - 1


def repeated(x):
    for _ in range(int(x.max())):
        x = x - 1
    return x


def by_places(x):
    return x if (torch.arange(x.shape[1]) >= 0).all() else x - 1


@pytest.mark.parametrize(
    ("code", "ways", "deciding"),
    [
        (above, [[1]], 1),
        (below, [[-10_000]], 1),
        (both, [[1], [1, -10_000]], 2),
        (checked, [], 0),
        (warned, [], 0),
        (scaled, [], 1),
        (none_there, [[0]], 1),
        (repeated, [[1]], 1),
        (by_places, [], 0),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_other_answers_are_tried(code, ways, deciding):
    found = ways_of(code)
    assert [[answer for _, answer in way.answers] for way in found.others] == ways
    assert len(found.deciding) == deciding
    assert found.too_many == ()
    assert all(site.file == __file__ for site in found.deciding)


def many(x):
    for n in range(40):
        code = compile(f"if x.max() > {n}: x = x - {n}", f"<line {n}>", "exec")
        held = {"x": x, "__name__": "definition"}
        exec(code, held)
        x = held["x"]
    return x


def test_there_may_be_too_many():
    assert ways_of(many).too_many


def long(x):
    return x - 1 if x.shape[1] > 40 else x


@pytest.mark.parametrize(("length", "ways"), [(None, []), (40, []), (41, [41]), (4096, [64]), (2, [])])
def test_a_long_sequence_is_looked_at_at_the_shortest_length_that_goes_its_way(length, ways):
    assert [way.length for way in ways_of(long, length).others] == ways


class Dropping(By):
    """Has ways to drop that an evaluation goes without, and one operation that only an evaluation has."""

    def __init__(self, code, change):
        super().__init__(code)
        self.dropout, self.change = nn.Dropout(0.5), change

    def forward(self, x):
        x = self.dropout(super().forward(x))
        x = nn.functional.dropout(x, 0.5, self.training)
        return x.exp() if self.change and not self.training else x


@pytest.mark.parametrize("change", [False, True])
def test_an_evaluation_is_looked_at_where_more_than_dropouts_differs(change):
    found = find_ways(Dropping(above, change), {"x": torch.empty(1, 2, 4, device="meta")})
    assert [(way.evaluates, len(way.answers)) for way in found.others] == (
        [(True, 0), (False, 1), (True, 1)] if change else [(False, 1)]
    )


def test_every_fact_of_a_way_is_joined():
    known = joined_ways._OF_ANY | joined_ways._BY_MODULE | {"other_calls"}
    known |= {
        "parts",
        "read_elsewhere",
        "stage_inputs",
        "cut_sizes",
        "readers",
        "without_rule",
        "shared",
        "problems",
        "calls",
    }
    assert {field.name for field in fields(TpFacts)} == known


def planned(tmp_path, code, layout):
    folder = remote.write(tmp_path / "model", code)
    session = open_session("auto", folder, LAYOUTS[layout], trust_remote_code=True)
    session.freeze_unreached(2, 16)
    return session.plan


GATHERED = ["another way if large", "another way if above", "another way if below", "two questions", "a loop"]


OF_WIDTH = [
    "a sum of as many ones as features",
    "how many ones for features",
    "a tensor of the width",
    "a list of the width",
]


@pytest.mark.parametrize(
    "name", [*GATHERED, *OF_WIDTH, *BY_MODE, "a size on another way", "another way if long", "chunks if long"]
)
def test_what_only_another_way_needs_whole_is_gathered(name, tmp_path):
    plan = planned(tmp_path, (BY_VALUES | BY_LENGTH | BY_MODE)[name], "tp2")
    assert {path for path in plan.tp_facts.gather if path.endswith(("gate_proj", "up_proj"))}


@pytest.mark.parametrize(
    ("name", "layout", "words"),
    [
        ("a number of the ids", "pp2", r"goes by the value that modeling_mine\.py:\d+ asks for"),
        ("a number of the embeddings", "pp2", r"goes by the value that modeling_mine\.py:\d+ asks for"),
        ("an early exit", "pp2", r"goes by the value that modeling_mine\.py:\d+ asks for"),
        ("an early exit if long", "pp2", "goes by the length of the sequence"),
        ("an early exit if long", "sp2", "whether it runs goes by the length of the sequence"),
        ("a number of the ids", "cp2", "it needs the whole sequence"),
        ("size", "sp2", "sequence parallelism: div.Tensor goes by the length of the sequence"),
        ("chunks", "sp2", "sequence parallelism: split.Tensor goes by the length of the sequence"),
        ("a sum of ones", "sp2", "sequence parallelism: ones goes by the length of the sequence"),
        ("a tensor of the size", "sp2", "sequence parallelism: full goes by the length of the sequence"),
        ("a list of the size", "sp2", "sequence parallelism: tensor goes by the length of the sequence"),
        ("how many ones", "sp2", "sequence parallelism: ones goes by the length of the sequence"),
        ("a grid", "sp2", "sequence parallelism: linspace goes by the length of the sequence"),
        ("a filled tensor", "cp2", r"context parallelism: fill_\.Scalar goes by the length of the sequence"),
        ("a tensor of the size between layers", "sp2", "sequence parallelism: full goes by the length"),
        ("a sum of ones between layers", "sp2", "sequence parallelism: ones goes by the length"),
        ("a number if long", "cp2", "context parallelism: mul.Tensor goes by the length of the sequence"),
    ],
)
def test_what_no_rank_could_know_is_refused(name, layout, words, tmp_path):
    with pytest.raises(ScheduleError, match=words):
        planned(tmp_path, (BY_VALUES | BY_LENGTH)[name], layout)


def test_a_list_as_long_as_the_sequence_is_refused_or_gets_all_of_it(tmp_path):
    if SEES_TENSORS_OF_LISTS:
        plan = planned(tmp_path, BY_LENGTH["a list of the size"], "cp2")
        assert set(plan.cp_facts.regions) == {f"model.layers.{index}.mlp" for index in range(2)}
    else:
        with pytest.raises(ScheduleError, match="context parallelism: tensor goes by the length of the sequence"):
            planned(tmp_path, BY_LENGTH["a list of the size"], "cp2")


@pytest.mark.parametrize("name", ["by the largest", "how many", "a list", "a tensor of a number"])
def test_modules_that_ask_of_a_part_of_a_sequence_get_it_whole(name, tmp_path):
    plan = planned(tmp_path, BY_VALUES[name], "cp2")
    assert set(plan.cp_facts.regions) == {f"model.layers.{index}.mlp" for index in range(2)}


@pytest.mark.parametrize("name", ["places of another length", "zeros as long", "a table of it"])
def test_modules_that_make_something_as_long_get_the_sequence_whole(name, tmp_path):
    plan = planned(tmp_path, BY_LENGTH[name], "sp2")
    assert {f"model.layers.{index}.mlp" for index in range(2)} <= set(plan.tp_facts.regions)


def test_checks_of_the_ids_are_no_hindrance(tmp_path):
    for layout in LAYOUTS:
        planned(tmp_path, BY_VALUES["a check of the ids"], layout)


def test_what_is_made_of_nothing_and_is_alike_is_no_hindrance(tmp_path):
    for layout in LAYOUTS:
        planned(tmp_path, BY_LENGTH["ones for tokens"], layout)
