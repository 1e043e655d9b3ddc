"""What a call is given that is of another type than it takes is refused at its line, before anything is built."""

import pytest
import torch
from torch import nn

import megasched
from megasched import ScheduleError
from megasched.language.signatures import unfit
from tests.lowering.models import Mlp


def _build(sch, fill, inputs):
    fill(sch)
    megasched.build(sch, inputs=inputs)


def refused(fill, inputs=None):
    """The one problem of a schedule, which names a line of this file; the model is as it was."""
    model = Mlp()
    modules, sch = dict(model.named_modules()), megasched.create_schedule(model)
    with pytest.raises(ScheduleError) as raised:
        _build(sch, fill, inputs)
    assert dict(model.named_modules()) == modules
    assert not any(module._forward_hooks for module in model.modules())
    (problem,) = raised.value.problems
    assert __file__ in problem.source
    return problem.what


@pytest.mark.parametrize(
    ("fill", "what"),
    [
        (lambda up: up.shard("weight", axis="0"), "shard: axis='0' is no int"),
        (lambda up: up.shard("weight", axis=True), "shard: axis=True is no int"),
        (lambda up: up.shard("weight", 0, ("a", 3)), "shard: components=('a', 3) is no Sequence[int] | None"),
        (lambda up: up.shard("weight", 0, (-8, 24)), "components (-8, 24) are no sizes"),
        (lambda up: up.shard(["weight", 3], 0), "shard: param=['weight', 3] is no str | Sequence[str]"),
        (lambda up: up.annotate("weight", 3, 4), "annotate: key=3 is no str"),
        (lambda up: up.annotate("weight", "shape", 4), "annotate: a parameter's shape can't be set: "),
        (lambda up: up.annotate("weight", "grad", 4), "annotate: a parameter's grad can't be set: "),
        (lambda up: up.adapt(rank=2.5), "adapt: rank=2.5 is no int"),
        (lambda up: up.adapt(rank=2, alpha="16"), "adapt: alpha='16' is no float | None"),
        (lambda up: up.replace(3), "replace: factory=3 is no nn.Module | Callable[[nn.Module], nn.Module]"),
        (lambda up: up.replace(nn.Identity, drop="weight"), "replace: drop='weight' is no tuple[str, ...]"),
        (
            lambda up: up.replace(nn.Identity, weights={"weight": 3}),
            "replace: weights={'weight': 3} is no Mapping",
        ),
        (lambda up: up.hook("fw_post", 3), "hook: fn=3 is no Callable[..., Any]"),
        (lambda up: up.hook("fw_post", lambda module: None), "<lambda> can't be called at fw_post"),
        (lambda up: up.hook("fw_pre", nn.Linear(2, 2)), "hook: Linear("),
        (lambda up: up.probe(every=1.5), "probe: every=1.5 is no int"),
        (lambda up: up.trace(inputs=torch.zeros(2, 8)), "trace: inputs=tensor("),
    ],
)
def test_refusals(fill, what):
    assert what in refused(lambda sch: fill(sch["up"]))


def test_inputs_have_names():
    for inputs in (torch.zeros(2, 8), [torch.zeros(2, 8)], {0: torch.zeros(2, 8)}):
        what = refused(lambda sch: sch["up"].shard("weight", axis=0), inputs)
        assert what == (
            f"inputs= is a {type(inputs).__name__}, and takes the arguments of the model's forward by their names"
        )


def test_hooks_of_every_form_are_taken():
    class Counted(nn.Module):
        def forward(self, module, inputs):
            calls.append("module")

    calls, sch = [], megasched.create_schedule(Mlp())
    sch["up"].hook("fw_pre", Counted())
    sch["up"].hook("fw_post", lambda *call: calls.append("any number"))
    sch["up"].hook("bw_post", lambda module, before, after, more=None: calls.append("a default"))
    megasched.build(sch)(torch.ones(2, 8)).sum().backward()
    assert calls == ["module", "any number", "a default"]


def test_what_is_declared():
    def function(self, a: "float", b: "tuple[str, ...]" = (), c: "Elsewhere | None" = None, *more: "int"): ...  # noqa: F821

    assert not list(unfit(function, {"a": 3, "b": ["x"], "c": object(), "more": ("x",)}))
    assert not list(unfit(function, {"a": torch.tensor(3).item(), "b": iter("ab")}))
    assert list(unfit(function, {"a": True, "b": "x"})) == [("a", "float"), ("b", "tuple[str, ...]")]
