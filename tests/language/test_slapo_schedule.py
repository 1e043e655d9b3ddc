"""The schedule in Slapo's words: children by name, lists of parameters, the group of ranks."""

import pytest
import torch
from torch import nn
from torch.distributed import new_group

import megasched
from megasched import ParallelDims, ScheduleError
from megasched.plan.make import make_plan
from megasched.verify.ranks.pool import init_megatron
from tests.lowering.models import Mlp, randomize
from tests.lowering.parity import compare, too_far

X = {"x": torch.linspace(-1, 1, 2 * 3 * 8).reshape(2, 3, 8)}


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Mlp()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU()), Mlp()])

    def forward(self, x):
        return self.layers[1](self.layers[0](self.first(x)))


@pytest.fixture
def sch():
    return megasched.create_schedule(Deep(), ParallelDims())


def test_children_by_name_those_of_lists_with_their_number(sch):
    assert list(sch.child) == ["first", "layers.0", "layers.1"]
    assert sch.child["layers.0"].child["1"] == sch["layers.0.1"]
    assert sch["first.up"].child == {}


def test_every_schedule_with_its_name(sch):
    named = dict(sch.named_schedules())
    assert list(named)[:3] == ["", "first", "first.up"]
    assert [name for name in named if name.count(".") < 2 and "layers" in name] == ["layers.0", "layers.1"]
    assert named["layers.1.up"] == sch["layers.1.up"]
    assert named[""] == sch
    below = dict(sch["layers.1"].named_schedules("here"))
    assert list(below) == ["here", "here.up", "here.act", "here.drop", "here.down"]
    assert below["here.up"].path == "layers.1.up"


def test_modules_by_name(sch):
    assert sch.get_module("layers.0.0") is sch.mod.layers[0][0]
    assert sch["layers.0"].get_module("") is sch.mod.layers[0]
    with pytest.raises(ScheduleError, match=r"no module 'layers\.7'"):
        sch.get_module("layers.7")


def both(sch):
    sch["up"].shard(["weight", "bias"], axis=0)
    sch["down"].shard(["weight"], axis=1)


def test_a_list_of_parameters_leaves_a_record_of_each():
    several, single = (megasched.create_schedule(Mlp(), ParallelDims()) for _ in range(2))
    both(several)
    single["up"].shard("weight", 0).shard("bias", 0)
    single["down"].shard("weight", 1)
    assert several.records == single.records
    again = megasched.create_schedule(Mlp(), ParallelDims())
    megasched.replay(several.records, again)
    assert again.records == several.records


def _cut():
    init_megatron(tp=2)
    return too_far(compare(randomize(Mlp()), both, X, X))


def test_a_list_of_parameters_is_cut(ranks):
    assert ranks.run(2, _cut) == [{}, {}]


def test_a_parameter_of_a_list_that_is_not_there_is_refused():
    sch = megasched.create_schedule(Mlp(), ParallelDims(tensor_model_parallel_size=2))
    sch["up"].shard(["weight", "scale"], axis=0)
    with pytest.raises(ScheduleError, match="Linear has no parameter 'scale'"):
        make_plan(sch, inputs=X)


def _with_groups():
    """Of each group: whether it is taken, or what is said of it."""
    init_megatron(tp=2)
    from megatron.core import parallel_state

    groups = {"tp": parallel_state.get_tensor_model_parallel_group(), "pair": new_group([0, 1])}
    groups |= {"alone": [new_group([rank]) for rank in (0, 1)][torch.distributed.get_rank()]}
    said = {}
    for name, group in groups.items():
        try:
            said[name] = str(megasched.create_schedule(Mlp(), group=group).layout.tp)
        except ScheduleError as error:
            said[name] = f"{error.problems[0].what}; {error.problems[0].remedy}"
    return said


def test_a_group_is_megatrons(ranks):
    for rank, said in enumerate(ranks.run(2, _with_groups)):
        assert (said["tp"], said["pair"]) == ("2", "2")
        assert said["alone"].startswith(
            f"group has the ranks [{rank}], and Megatron's tensor-parallel group here has [0, 1]; megatron.core."
            "parallel_state.initialize_model_parallel(tensor_model_parallel_size=1) makes"
        )
