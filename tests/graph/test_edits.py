"""Several edits of one traced module: side by side in any order, one reading what another gives, never tangled."""

import copy
from functools import partial, reduce
from itertools import permutations
from operator import or_

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import megasched
from megasched import Subgraph
from megasched.graph import patterns
from megasched.plan.make import make_plan
from tests.graph.test_primitives import INPUTS, X, alike, backward, refusal, schedule
from tests.lowering.models import randomize, tiny_model


class Chain(nn.Module):
    """Parts that read one another: [b, s, 8] -> [b, s, 8]."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.RMSNorm(8, eps=1e-6), nn.Dropout(0.5)
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        x = self.norm(x)
        x = self.drop(F.silu(self.gate(x)) * self.up(x))
        return F.gelu(self.down(x)).tanh()


def traced(module, decompose=()):
    sch = megasched.create_schedule(nn.Sequential(copy.deepcopy(module)))
    for name in decompose:
        sch["0"][name].decompose()
    sch["0"].trace(inputs=INPUTS)
    return sch, sch["0"]


@pytest.mark.parametrize("order", [*permutations(("fuse", "checkpoint", "replace"))], ids="-".join)
def test_edits_side_by_side_compute_the_same_in_any_order(order):
    model = randomize(Chain())
    torch.manual_seed(3)
    want = backward(nn.Sequential(copy.deepcopy(model)))
    sch, node = traced(model, decompose=("up", "down"))
    found = []

    def keep(old):
        found.append([n.op for n in old.graph.nodes].count("placeholder"))
        return old

    def edit(name):
        if name == "fuse":
            node.fuse(node.find(patterns.swiglu)[0], compiler="megatron")
        elif name == "checkpoint":
            node.checkpoint(node.find(r"drop\.dropout")[0])
        else:
            node.replace(keep, subgraph=node.find(patterns.bias_gelu)[0])

    node.checkpoint(node.find(patterns.rms_norm)[0])
    for name in order:
        edit(name)
    node.replace(lambda old: torch.tanh, subgraph=node.find("tanh")[0])
    node.replace(keep, subgraph=node.find(r"up\.t")[0] | node.find(r"up\.matmul")[0] | node.find(r"up\.add")[0])
    built = megasched.build(sch)
    torch.manual_seed(3)
    assert alike(backward(built), want, 1e-5)
    assert found == [2, 3]  # down's product and bias; the norm's result, weight and bias


class Casts(nn.Module):
    """Two readers of one conversion, which converts nothing here: [b, s, 8] -> [b, s, 8]."""

    def forward(self, x):
        wide = x.exp().float()
        return torch.sin(wide) * torch.cos(wide)


def test_conversions_that_convert_nothing_lie_between_edits():
    want = backward(nn.Sequential(Casts()))
    for taken in ((r"exp", r"to"), (r"to", r"sin")):
        sch, node = traced(Casts())
        first = node.find(taken[0])[0] | node.find(taken[1])[0]
        node.checkpoint(first)
        for name in ("exp", "sin", "cos", "mul"):
            if name not in first.nodes:
                node.replace(lambda old: old, subgraph=node.find(name)[0])
        assert alike(backward(megasched.build(sch)), want)


def test_conversions_between_which_others_lie_are_refused_before_a_run_of_another_type_does():
    _, node = traced(Casts())
    said = refusal(node.checkpoint, node.find("to")[0] | node.find("mul")[0])
    assert "lies between two inside of it: to, mul" in said


def test_a_tensor_that_is_read_twice_is_handed_over_twice():
    class Twice(nn.Module):
        def forward(self, x):
            return F.silu(x) * x

    sch, node = traced(Twice())
    part = node.find(patterns.swiglu)[0]
    assert part.inputs == ("x", "x")
    node.checkpoint(part)
    assert alike(backward(megasched.build(sch)), backward(nn.Sequential(Twice())))


def test_what_is_found_in_another_order_of_inputs_is_never_guessed():
    sch, node = traced(Chain())
    node.replace(lambda old: old, subgraph=Subgraph("0", ("silu", "mul"), inputs=("gate", "norm.rms_norm")))
    said = refusal(megasched.build(sch), X)
    assert "reads gate, up when it runs, and read gate, norm.rms_norm when it was found" in said


def test_an_overlap_is_told_with_both_lines():
    sch, node = traced(Chain())
    gelu, tanh = node.find("gelu")[0], node.find("tanh")[0]
    node.checkpoint(gelu | tanh)
    node.replace(lambda old: old, subgraph=tanh)
    first, second = (record.source for record in sch.records if "subgraph" in record.arguments)
    assert first != second
    said = refusal(megasched.build, sch)
    assert f"replace: tanh belongs to the sub-graph of checkpoint at {first} already" in said
    assert f"asked for at: {second}" in said


class Crossed(nn.Module):
    """Two ways through: x -> exp -> sin and x -> cos -> tanh, each end read with the other's start."""

    def forward(self, x):
        exp, cos = x.exp(), x.cos()
        return (exp + cos.sin()) * (cos + exp.tanh())


def test_parts_that_wait_for_each_other_are_told_with_both_lines():
    sch, node = traced(Crossed())
    one = node.find("exp")[0] | node.find("sin")[0]
    other = node.find("cos")[0] | node.find("tanh")[0]
    node.checkpoint(one)
    assert sch.records  # by itself it is one part
    node.checkpoint(node.find("mul")[0])
    node.replace(lambda old: old, subgraph=other)
    said = refusal(megasched.build, sch)
    first, _, second = (record.source for record in sch.records if "subgraph" in record.arguments)
    assert f"replace: this sub-graph and that of checkpoint at {first} each need a result of the other" in said
    assert f"asked for at: {second}" in said


class Idle(nn.Module):
    """Computes what it does not return: [b, s, 8] -> [b, s, 8]."""

    def forward(self, x):
        x.exp().float().sin()
        return x.cos()


def test_a_part_that_changes_nothing_is_refused_where_it_is_taken():
    _, node = traced(Casts())
    assert "in a run of that type does nothing: to" in refusal(node.checkpoint, node.find("to")[0])
    _, node = traced(Idle())
    for name in ("sin", "to|sin", "exp|to|sin"):
        found = node.find(name)
        assert "nothing outside of the sub-graph needs" in refusal(node.checkpoint, reduce(or_, found))


class Split(nn.Module):
    def __init__(self):
        super().__init__()
        self.both = nn.Linear(8, 16)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, dim=-1)
        return F.silu(gate) * up


def test_an_operation_with_several_results_is_taken_with_what_takes_each():
    torch.manual_seed(3)
    model = randomize(Split())
    want = backward(nn.Sequential(copy.deepcopy(model)))
    sch, node = traced(model)
    chunk, first, second = node.find(r"chunk|getitem(_\d+)?")
    for some in (chunk, first, second, chunk | first, first | second):
        for call in (node.checkpoint, partial(node.replace, lambda old: old), node.fuse):
            assert "join chunk | getitem | getitem_1" in refusal(call, subgraph=some)
    node.checkpoint(chunk | first | second)
    assert alike(backward(megasched.build(sch)), want)
    sch, node = traced(model)
    node.replace(lambda old: old, subgraph=chunk | first | second)
    assert alike(backward(megasched.build(sch)), want)


@pytest.mark.parametrize("compiler", ["inductor", "unchanged"])
@pytest.mark.parametrize(
    ("names", "call"),
    [(r"mlp\.(mul|down_proj)", "mlp.down_proj"), (r"self_attn\.(attention|reshape)", "self_attn.attention")],
)
def test_fuse_refuses_live_calls_by_name(compiler, names, call):
    megasched.register_compiler("unchanged")(_as_it_is)
    sch = megasched.create_schedule(tiny_model("llama"))
    layer = sch["model.layers.0"]
    layer.trace()
    before, live = layer.find(names)
    said = refusal(layer.fuse, before | live, compiler=compiler)
    assert f"holds live calls, which can't be compiled: {call}" in said
    assert "fuse what lies before and behind as two sub-graphs" in said
    assert "decompose() before trace()" in said
    assert "module: model.layers.0\n    asked for at: " in said
    assert [record.primitive for record in sch.records] == ["trace"]


def _as_it_is(part):
    return part.graph


def test_inductor_compiles_both_sides_of_a_live_call(compiling):
    model = randomize(Chain())
    model.drop.p = 0.0
    want = backward(nn.Sequential(copy.deepcopy(model)))
    sch, node = traced(model)
    node.fuse(node.find(patterns.swiglu)[0] | node.find(r"drop\.dropout")[0])
    node.fuse(node.find("gelu")[0] | node.find("tanh")[0])
    assert alike(backward(megasched.build(sch)), want, 1e-5)


def test_the_product_of_a_linear_that_will_be_sharded_is_refused():
    """The graph of the definition shows it; when the model runs, Megatron's layer computes it."""
    sch = megasched.create_schedule(tiny_model("llama"))
    mlp = sch["model.layers.0.mlp"]
    mlp["up_proj"].shard("weight", axis=0)
    mlp["up_proj"].decompose()
    mlp.trace()
    mlp.fuse(mlp.find(r"up_proj\.matmul")[0] | mlp.find("mul")[0])
    mlp.checkpoint(mlp.find(r"up_proj\.t")[0])
    said = refusal(megasched.build, sch)
    assert "fuse: up_proj.matmul can't be taken: model.layers.0.mlp.up_proj is sharded at " in said
    assert "checkpoint: up_proj.t can't be taken" in said
    assert said.count("test_edits.py:") == 4


def test_what_can_not_run_in_a_part_is_refused():
    sch = schedule()
    gelu = sch["0"].find("act.gelu")[0]
    assert "factory=3 is no nn.Module" in refusal(lambda: sch["0"].replace(3, subgraph=gelu))
    sch["0"].replace(nn.PReLU(), subgraph=gelu)
    assert "PReLU has parameters" in refusal(make_plan, sch)


class Overwrites(nn.Module):
    """``exp`` reads what is written to later, and ``sin`` what was written to before."""

    def __init__(self, write):
        super().__init__()
        self.up, self.write = nn.Linear(8, 8), write

    def forward(self, x):
        y = self.up(x) * 2
        before = y.exp()
        other = self.write(y)
        return before * y.sin() + (0 if other is None else other)


class Adds(nn.Module):
    def forward(self, y):
        y.add_(1)
        return y.cos()


def _through_a_view(y):
    y.view(6, 8).add_(1)


def _in_a_region(y):
    with torch.no_grad():
        y.add_(1)


@pytest.mark.parametrize("write", [_through_a_view, _in_a_region, Adds()])
def test_a_part_around_a_write_to_what_it_reads_is_refused(write):
    torch.manual_seed(3)
    sch = megasched.create_schedule(nn.Sequential(Overwrites(write)))
    sch["0"].trace(inputs={"x": X}, leaves=["write"] if isinstance(write, nn.Module) else ())
    exp, sin = (sch["0"].find(name)[0] for name in ("exp", "sin"))
    product = sch["0"].find(lambda before, y: before.exp() * y.sin())[0]
    for part in (product, exp | sin):
        said = refusal(sch["0"].replace, lambda old: old, subgraph=part)
        assert "writes to what operations read that would then run on the other side of it" in said
    for part in (exp, sin):
        sch["0"].replace(lambda old: old, subgraph=part)
    want = copy.deepcopy(sch.mod)(X)
    assert torch.equal(megasched.build(sch)(X), want)


def test_a_part_around_a_write_to_something_else_runs():
    class Writes(nn.Module):
        def forward(self, x):
            y, other = x * 2, x * 3
            before = y.exp()
            other.add_(1)
            return before * y.sin() + other

    sch = megasched.create_schedule(nn.Sequential(Writes()))
    sch["0"].trace(inputs={"x": X})
    sch["0"].replace(lambda old: old, subgraph=sch["0"].find(lambda before, y: before.exp() * y.sin())[0])
    want = copy.deepcopy(sch.mod)(X)
    assert torch.equal(megasched.build(sch)(X), want)
