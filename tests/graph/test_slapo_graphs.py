"""Graphs in Slapo's words: functions of nodes, lists of one sub-graph, names, leaves by their class."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import megasched
from megasched import ScheduleError, Subgraph
from megasched.graph import patterns, traced
from tests.lowering.models import Mlp, randomize

X = torch.linspace(-1, 1, 48).reshape(2, 3, 8)
INPUTS = {"x": torch.empty(2, 3, 8)}
EVERY = ["up", "act.gelu", "drop.dropout", "down"]


def schedule(**options):
    sch = megasched.create_schedule(nn.Sequential(randomize(Mlp())))
    sch["0"].trace(inputs=INPUTS, **options)
    return sch


def names(found):
    return [part.nodes[0] for part in found]


def refusal(call, *args, **kwargs):
    with pytest.raises(ScheduleError) as caught:
        call(*args, **kwargs)
    (problem,) = caught.value.problems
    return problem.what, problem.remedy


def backward(model):
    model.zero_grad(set_to_none=True)
    x = X.clone().requires_grad_()
    output = model(x)
    output.square().sum().backward()
    return [output.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(
    ("chooses", "want"),
    [
        (lambda node: node.op == "call_module", ["up", "down"]),
        (lambda node: node.op == "call_module" and node.target == "up", ["up"]),
        (lambda node: node.target is torch.ops.aten.gelu.default, ["act.gelu"]),
        (lambda node: node.operation == "dropout", ["drop.dropout"]),
        (lambda node: node.module == "act", ["act.gelu"]),
        (lambda node: "act.gelu" in node.args, ["drop.dropout"]),
        (lambda node: "x" in node.args, ["up"]),
        (lambda node: node.name.startswith("d"), ["drop.dropout", "down"]),
    ],
)
def test_a_function_of_a_node_chooses_operations(chooses, want):
    mlp = schedule()["0"]
    assert mlp.find(chooses) == [Subgraph("0", (name,)) for name in want]
    assert mlp.find_node(chooses) == mlp.find(chooses)


def test_find_node_takes_any_function_and_find_a_pattern():
    mlp = schedule()["0"]
    assert names(mlp.find_node(lambda each: each.operation == "gelu")) == ["act.gelu"]
    assert names(mlp.find(lambda x: F.gelu(x))) == ["act.gelu"]
    assert mlp.find_subgraph(lambda x: F.gelu(x)) == mlp.find(patterns.gelu.spellings["erf"])
    assert names(mlp.find_node(r"act\..*")) == ["act.gelu"]


def test_nothing_chosen_says_what_nodes_are_and_which_there_are():
    mlp = schedule()["0"]
    what, remedy = refusal(mlp.find, lambda node: node.op == "call_method" and node.target == "view")
    assert what == "find: nothing matches the function"
    assert remedy.startswith("a node's op is call_module or call_function, its target a path or an operator")
    assert remedy.endswith(", ".join(EVERY))
    assert mlp.find(lambda node: False, missing_ok=True) == []
    assert refusal(mlp.find_node, lambda node: node.users) == (
        "find: the function raised AttributeError: 'GraphNode' object has no attribute 'users'",
        "a node has name, op, target, operation, module and args",
    )


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, EVERY),
        ({"recursive": True}, EVERY),
        ({"recursive": False}, ["up", "act", "drop", "down"]),
        ({"recursive": False, "flatten": True}, EVERY),
        ({"leaf_modules": ["GELU"]}, ["up", "act", "drop.dropout", "down"]),
        ({"leaf_modules": ["act"], "leaves": [nn.Dropout]}, ["up", "act", "drop", "down"]),
    ],
)
def test_how_far_a_trace_goes_in_slapos_words(options, want):
    sch = schedule(**options)
    assert names(sch["0"].find(".*")) == want
    again = megasched.create_schedule(nn.Sequential(Mlp()))
    megasched.replay(sch.records, again)
    assert again.records == sch.records
    assert names(again["0"].find(".*")) == want


def test_what_a_trace_can_not_honour_is_refused():
    mlp = megasched.create_schedule(nn.Sequential(Mlp()))["0"]
    what, remedy = refusal(mlp.trace, recursive=True, flatten=False)
    assert what == "trace: recursive=True with flatten=False asks for a graph of each child, too"
    assert remedy.startswith("leave both out, and one graph looks into the children")
    what, remedy = refusal(mlp.trace, concrete_args={"mask": None})
    assert what == "trace: got an unexpected keyword argument 'concrete_args'"
    assert remedy.startswith("concrete_args: leave it out")
    assert (
        refusal(mlp.trace, leaf_modules=["Gelu"], inputs=INPUTS)[0]
        == "leaves: nothing below this module is 'Gelu'"
    )


@pytest.fixture
def codes(monkeypatch):
    """Code of each graph, after each edit."""
    found = []
    apply = traced.apply_edit

    def noted(graph, edit, path):
        apply(graph, edit, path)
        found.append(graph.module.code)

    monkeypatch.setattr(traced, "apply_edit", noted)
    return found


def test_lists_of_one_and_names_and_no_number_changes(codes):
    sch = schedule()
    want = backward(nn.Sequential(randomize(Mlp())))
    mlp = sch["0"]
    megasched.register_compiler("as it is")(as_it_is)
    mlp.fuse(mlp.find(lambda x: F.gelu(x)), compiler="as it is", name="Activation")
    mlp.checkpoint(mlp.find(r"drop\..*"))
    mlp.replace(lambda old: old, mlp.find(r"down"))
    assert [record.arguments["subgraph"]["nodes"] for record in sch.records[1:]] == [
        ("act.gelu",),
        ("drop.dropout",),
        ("down",),
    ]
    built = megasched.build(sch)
    assert all(torch.equal(got, value) for got, value in zip(backward(built), want, strict=True))
    assert "Activation(" in codes[0]


def as_it_is(part):
    return part.graph


def test_torchscript_stands_for_inductor():
    sch, same = schedule(), schedule()
    sch["0"].fuse(sch["0"].find(patterns.gelu), compiler="TorchScript")
    same["0"].fuse(same["0"].find(patterns.gelu)[0], compiler="inductor")
    assert sch.records == same.records


def test_refused_sub_graphs():
    mlp = schedule()["0"]
    several = mlp.find("act.*|drop.*")
    assert refusal(mlp.fuse, several)[0] == "fuse takes a sub-graph, not a list of them"
    assert refusal(mlp.fuse, several[:1], name="Bias GeLU")[0] == (
        "fuse: 'Bias GeLU' is no name in the code of a graph: letters, digits and _ are"
    )
    assert refusal(mlp.checkpoint, several[0], order_args_fn=lambda x: (x,))[1] == "leave order_args_fn out"
    what, remedy = refusal(mlp.replace, nn.GELU(), several[0], name="Gelu")
    assert what == "replace: got an unexpected keyword argument 'name'"
    assert remedy == "name: leave it out: a module keeps the name of the one that it replaces"
