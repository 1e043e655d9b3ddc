"""Primitives: listed, documented, registered by third parties, refused twice."""

import re

import pytest
import torch
from torch import nn

import megasched
from megasched import ConfigError, ParallelDims, Primitive, ScheduleError
from megasched.language import registry
from megasched.plan.make import make_plan

BUILT_IN = {
    "annotate",
    "checkpoint",
    "cut_pipeline_stage",
    "fork_rng",
    "hook",
    "replace",
    "replace_all",
    "shard",
    "sync",
}


@pytest.fixture(autouse=True)
def own_registries(monkeypatch):
    """What a test registers is gone after it."""
    registry.get_lowering("checkpoint")
    monkeypatch.setattr(registry, "_PRIMITIVES", dict(registry._PRIMITIVES))
    monkeypatch.setattr(registry, "_LOWERINGS", dict(registry._LOWERINGS))


def scale_primitive():
    class Scale(Primitive):
        """Multiplies what a module returns."""

        name = "scale"
        aliases = ("times",)

        def record(self, node, factor: float):
            return {"factor": factor}

        def check(self, node, arguments, source):
            if arguments["factor"]:
                return []
            return [megasched.Problem("scale by zero", node.path, source, "any other factor")]

    return Scale


def scale_lowering(module, record, context):
    module.register_forward_hook(lambda module, args, output: output * record.arguments["factor"])


def test_all_built_in_primitives_are_listed():
    assert set(megasched.list_primitives(name_only=True)) >= BUILT_IN


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_documentation_has_the_call_and_every_parameter(name):
    text = megasched.list_primitives()[name]
    head = text.splitlines()[0]
    assert head.startswith(f"{name}(")
    assert "node" not in head
    for parameter in re.findall(r"[(,] (\w+):", head.replace("(", "( ")):
        assert re.search(rf"\b{parameter}\b", text.replace(head, "")), parameter


def test_aliases_are_documented_and_call_the_same():
    assert "Also known as: pipeline_split" in megasched.list_primitives()["cut_pipeline_stage"]
    sch = megasched.create_schedule(nn.Sequential(nn.Linear(2, 2)), ParallelDims())
    sch["0"].pipeline_split()
    assert sch.records[0].primitive == "cut_pipeline_stage"


def test_a_third_partys_primitive_works_end_to_end():
    megasched.register_primitive(scale_primitive())
    megasched.register_lowering("scale")(scale_lowering)
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    x = torch.tensor([[1.0, -2.0]])
    want = 3 * model(x)
    sch = megasched.create_schedule(model, ParallelDims())
    sch["1"].times(factor=3.0)
    assert str(sch.records[0]) == "1: scale(factor=3.0)"
    assert megasched.list_primitives()["scale"].startswith(
        "scale(factor: float)\n\nMultiplies what a module returns."
    )
    assert torch.equal(megasched.build(sch)(x), want)


def test_a_third_partys_check_is_in_the_report():
    megasched.register_primitive(scale_primitive())
    megasched.register_lowering("scale")(scale_lowering)
    sch = megasched.create_schedule(nn.Sequential(nn.Linear(2, 2)), ParallelDims())
    sch["0"].scale(0)
    with pytest.raises(ScheduleError, match="scale by zero") as raised:
        megasched.build(sch)
    assert raised.value.problems[0].source == sch.records[0].source


def test_a_primitive_without_a_lowering_is_refused_at_build():
    megasched.register_primitive(scale_primitive())
    model = nn.Sequential(nn.Linear(2, 2))
    sch = megasched.create_schedule(model, ParallelDims())
    sch["0"].scale(2)
    sch["0"].hook("fw_pre", print)
    with pytest.raises(ScheduleError, match="primitive 'scale' has no lowering") as raised:
        megasched.build(sch)
    assert "register_lowering" in raised.value.problems[0].remedy
    assert not model[0]._forward_pre_hooks


def test_registered_twice():
    first, second = scale_primitive(), scale_primitive()
    megasched.register_primitive(first)
    megasched.register_primitive(second)  # the same file, run again
    third = scale_primitive()
    third.__module__ = "another.package"
    with pytest.raises(ConfigError, match=r"'scale' is registered twice: by .*test_registry.*another\.package"):
        megasched.register_primitive(third)


def test_an_alias_that_is_taken_registers_nothing():
    cls = scale_primitive()
    cls.aliases = ("times", "shard")
    with pytest.raises(ConfigError, match="'shard' is registered twice"):
        megasched.register_primitive(cls)
    assert not registry.has_primitive("scale")
    assert not registry.has_primitive("times")


@pytest.mark.parametrize("name", ["role", "path", "records", "_scale"])
def test_a_name_that_a_schedule_has_already_is_refused(name):
    cls = scale_primitive()
    cls.name = name
    with pytest.raises(ConfigError, match=f"can't be called '{name}'"):
        megasched.register_primitive(cls)


def test_a_decorator_with_parentheses_registers_too():
    cls = megasched.register_primitive()(scale_primitive())
    assert type(registry.get_primitive("times")) is cls


class SlaposForm(Primitive):
    @staticmethod
    def name():
        return "scale"

    @staticmethod
    def apply(sch, factor):
        sch.mod.factor = factor


@pytest.mark.parametrize("cls", [SlaposForm, int, print])
def test_what_is_no_primitive_is_told_the_form_of_one(cls):
    with pytest.raises(ConfigError, match=r"is no primitive: one is a subclass of megasched.Primitive") as raised:
        megasched.register_primitive(cls)
    assert "record()" in str(raised.value)
    assert "register_lowering" in str(raised.value)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"factr": 2}, "scale: missing a required argument: 'factor'"),
        ({"factor": 2, "bias": 1}, "scale: got an unexpected keyword argument 'bias'"),
        ({"factor": 2, "groups": 1}, "scale: got an unexpected keyword argument 'groups'"),
    ],
)
def test_arguments_that_a_primitive_does_not_take_are_refused_with_the_line(given, what):
    cls = scale_primitive()
    cls.instead = {"groups": "scale each by itself"}
    megasched.register_primitive(cls)
    sch = megasched.create_schedule(nn.Sequential(nn.Linear(2, 2)), ParallelDims())
    call = lambda: sch["0"].scale(**given)  # noqa: E731
    with pytest.raises(ScheduleError) as raised:
        call()
    (problem,) = raised.value.problems
    remedy = "groups: scale each by itself" if "groups" in given else "scale(factor: float)"
    assert (problem.what, problem.module, problem.remedy) == (what, "0", remedy)
    assert problem.source == f"{__file__}:{call.__code__.co_firstlineno}"
    assert sch.records == []


def test_lowerings_registered_twice():
    megasched.register_lowering("scale")(scale_lowering)
    megasched.register_lowering("scale")(scale_lowering)
    with pytest.raises(ConfigError, match="a lowering of 'scale' is registered already"):
        megasched.register_lowering("scale")(lambda module, record, context: None)
    for planned in ("shard", "replace"):
        with pytest.raises(ConfigError, match=f"a lowering of '{planned}' is registered already"):
            megasched.register_lowering(planned)(scale_lowering)


def test_an_unknown_primitive_lists_those_that_exist():
    with pytest.raises(ConfigError, match=r"no primitive 'scale'; there are: adapt, annotate, checkpoint"):
        registry.get_primitive("scale")


def test_a_primitive_that_defines_no_record():
    class Empty(Primitive):
        name = "empty"

    megasched.register_primitive(Empty)
    with pytest.raises(NotImplementedError, match=r"primitive empty defines no record\(\)"):
        megasched.create_schedule(nn.Linear(2, 2), ParallelDims()).empty()


def test_every_public_name_of_a_schedule_is_reserved():
    from megasched.language.registry import RESERVED
    from megasched.language.schedule import Schedule

    assert {name for name in dir(Schedule) if not name.startswith("_")} == set(RESERVED)


def test_what_a_third_party_does_not_say_is_safe():
    """Its call is carried out on the lowered module itself: nothing is fused there, no block stands around it."""
    said = {name: value for name, value in vars(Primitive).items() if name in Primitive.__annotations__}
    assert said == {
        "aliases": (),
        "leaves_record": True,
        "phase": "lowered",
        "replaces_modules": False,
        "survives_replacement": False,
        "of_weights": False,
        "of_definition": False,
        "acts_on_calls": False,
        "keeps_product": False,
        "on_megatron_module": True,
        "inside_megatron_module": False,
        "one_call_in_graph": "never",
        "makes_graph": False,
        "takes_subgraph": False,
        "inlines_subgraph": False,
        "runs_code_again": False,
        "chooses_trained": False,
        "shown_by_effect": False,
        "instead": {},
    }


def test_every_attribute_of_a_primitive_is_documented():
    documented = set(re.findall(r"^ {8}(\w+):", Primitive.__doc__, re.MULTILINE))
    assert documented == Primitive.__annotations__.keys()


def test_what_is_lowered_has_a_lowering():
    for name in registry.list_primitives(name_only=True):
        assert (
            registry.has_lowering(registry.get_primitive(name)) or not registry.get_primitive(name).leaves_record
        )


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.down(torch.sigmoid(self.gate(x)) * self.up(x))


@pytest.mark.parametrize(("keeps", "fused_columns"), [(True, (("gate", "up"),)), (False, ())])
def test_what_keeps_a_product_is_said_by_its_class(keeps, fused_columns):
    """Another call on a column takes it out of the product that it would be computed by with others."""
    cls = scale_primitive()
    cls.keeps_product = keeps
    megasched.register_primitive(cls)
    megasched.register_lowering("scale")(scale_lowering)
    sch = megasched.create_schedule(Gated(), ParallelDims(tensor_model_parallel_size=2))
    sch["gate"].shard("weight", axis=0)
    sch["up"].shard("weight", axis=0).scale(2.0)
    sch["down"].shard("weight", axis=1)
    assert make_plan(sch, inputs={"x": torch.zeros(2, 3, 8)}).fused_columns == fused_columns
