"""Replace_all: by class, role or regular expression, outermost first, not into what it has put there."""

import copy

import pytest
import torch
from torch import nn

import megasched
from megasched import ParallelDims, ScheduleError
from megasched.language.roles import Roles


class Special(nn.Linear):
    pass


class Pair(nn.Module):
    """Holds what it replaces, as a wrapper of a linear does."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(self.inner(x))


@pytest.fixture
def model():
    return nn.Sequential(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Special(4, 4)),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
    )


def classes(model):
    return {
        path: type(module).__name__ for path, module in model.named_modules() if "." in path or "inner" in path
    }


def build(model, fill, roles=None):
    sch = megasched.create_schedule(model, ParallelDims(), roles)
    fill(sch)
    return megasched.build(sch)


def test_by_exactly_this_class(model):
    linears = [model[0][0], model[1][0]]
    build(model, lambda sch: sch.replace_all(nn.Linear, Pair))
    assert [type(layer[0]) for layer in model] == [Pair, Pair]
    assert [layer[0].inner for layer in model] == linears  # and not wrapped again
    assert type(model[0][2]) is Special


def test_below_one_module_only(model):
    build(model, lambda sch: sch["1"].replace_all(nn.ReLU, lambda old: nn.GELU()))
    assert [type(layer[1]) for layer in model] == [nn.ReLU, nn.GELU]


def test_by_a_regular_expression_over_the_whole_path(model):
    with pytest.raises(ScheduleError, match="nothing matches"):
        build(model, lambda sch: sch.replace_all(r"\.1", lambda old: nn.GELU()))
    build(model, lambda sch: sch.replace_all(r"\d\.1", lambda old: nn.GELU()))
    assert [type(layer[1]) for layer in model] == [nn.GELU, nn.GELU]


def test_by_role(model):
    roles = Roles({"0.0": "mlp.up", "1.0": "mlp.up", "0.2": "mlp.down"})
    build(model, lambda sch: sch.replace_all("mlp.up", lambda old: Special(4, 4)), roles)
    assert [type(layer[0]) for layer in model] == [Special, Special]


def test_the_outermost_match_alone(model):
    build(model, lambda sch: sch.replace_all(r"0(\..*)?", lambda old: Pair(old)))
    assert type(model[0]) is Pair
    assert type(model[0].inner[0]) is nn.Linear


def test_each_gets_a_module_of_its_own(model):
    one = nn.GELU()
    with pytest.raises(ScheduleError, match=r"the same module instance already stands at 0\.1"):
        build(model, lambda sch: sch.replace_all(nn.ReLU, lambda old: one))
    assert [type(layer[1]) for layer in model] == [nn.ReLU, nn.ReLU]


def test_weights_and_drop_as_in_replace(model):
    class Gain(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Linear(4, 4, bias=False)

        def forward(self, x):
            return self.gain(x)

    weights = [model[0][0].weight, model[1][0].weight]
    build(
        model,
        lambda sch: sch.replace_all(
            nn.Linear, lambda old: Gain(), weights={"gain.weight": "weight"}, drop=("bias",)
        ),
    )
    assert [layer[0].gain.weight for layer in model] == weights


@pytest.mark.parametrize("what", [nn.Conv2d, "mlp.up", r"2\..*"])
def test_no_match_is_an_error(model, what):
    fill = lambda sch: sch.replace_all(what, lambda old: old)  # noqa: E731
    with pytest.raises(ScheduleError, match="replace_all: nothing matches") as raised:
        build(model, fill)
    assert raised.value.problems[0].source == f"{__file__}:{fill.__code__.co_firstlineno}"


def test_a_broken_regular_expression_says_so(model):
    with pytest.raises(ScheduleError, match=r"replace_all: '\(' is no regular expression"):
        build(model, lambda sch: sch.replace_all("(", lambda old: old))


def by_path(path, old):
    """Of Slapo's form; what the new module computes depends on where it stands."""
    return nn.GELU(approximate="tanh" if path.startswith("0") else "none")


def test_a_factory_that_takes_the_path_too(model):
    x = torch.linspace(-2, 2, 8).reshape(2, 4)
    want = nn.Sequential(
        nn.Sequential(model[0][0], nn.GELU(approximate="tanh"), model[0][2]),
        nn.Sequential(model[1][0], nn.GELU()),
    )
    want(x).square().sum().backward()
    gradients = [parameter.grad for parameter in want.parameters()]
    output = want(x)
    want.zero_grad(set_to_none=True)
    build(model, lambda sch: sch.replace_all(nn.ReLU, by_path))
    model(x).square().sum().backward()
    assert torch.equal(model(x), output)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))


def test_the_path_is_that_below_the_node(model):
    paths = []

    def noted(path, old):
        paths.append(path)
        return nn.GELU()

    other = copy.deepcopy(model)
    build(model, lambda sch: sch["0"].replace_all(nn.ReLU, noted))
    build(other, lambda sch: sch.replace_all(nn.ReLU, noted))
    assert paths == ["1", "0.1", "1.1"]


def test_a_factory_of_neither_form_says_so(model):
    with pytest.raises(
        ScheduleError, match=r"the factory raised TypeError: .*missing 1 required positional argument"
    ):
        build(model, lambda sch: sch.replace_all(nn.ReLU, lambda path, old, more: nn.GELU()))


def test_other_arguments_of_slapos_are_refused_with_what_they_are_here(model):
    with pytest.raises(ScheduleError, match="make_mod_fn: here it is called factory"):
        build(model, lambda sch: sch.replace_all(nn.ReLU, make_mod_fn=by_path))
