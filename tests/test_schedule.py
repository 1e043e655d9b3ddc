"""The tree: items, globs, slices, roles, shared modules, and what its errors say."""

import fnmatch
import inspect
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import megasched
from megasched import ParallelDims, ScheduleError, ScheduleList
from megasched.language.roles import Roles


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


class Model(nn.Module):
    """Nested lists, and one embedding under two names."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.stacks = nn.ModuleList(nn.ModuleList(Layer() for _ in range(3)) for _ in range(2))
        self.decoder = nn.Module()
        self.decoder.embed_tokens = self.embed
        self.decoder.head = nn.Linear(4, 10)


@pytest.fixture
def sch():
    return megasched.create_schedule(Model(), ParallelDims())


def paths(found):
    return [item.path for item in found]


def here(plus):
    """``file:line`` of the line so many below the caller's."""
    return f"{__file__}:{inspect.currentframe().f_back.f_lineno + plus}"


def problem_of(raised):
    (problem,) = raised.value.problems
    return problem


def test_items_reach_any_depth(sch):
    assert sch["stacks.1.2.mlp.0"].mod is sch.mod.stacks[1][2].mlp[0]
    assert sch["stacks"]["1"][2]["mlp"][0].path == "stacks.1.2.mlp.0"
    assert sch["stacks.0"][-1].path == "stacks.0.2"
    assert sch[""] == sch.root == sch


def test_children_iteration_length_and_membership(sch):
    assert paths(sch["stacks.0"]) == ["stacks.0.0", "stacks.0.1", "stacks.0.2"]
    assert paths(sch["stacks.0.0"].children()) == ["stacks.0.0.norm", "stacks.0.0.mlp"]
    assert len(sch["stacks"]) == 2
    assert "stacks.0.1.mlp.2" in sch
    assert "stacks.0.3" not in sch
    assert len(sch["stacks.0.0.norm"]) == 0
    assert sch["stacks.0.0.norm"]  # a leaf is no falsehood


def test_parent_and_root(sch):
    linear = sch["stacks.0.0.mlp.0"]
    assert linear.parent == sch["stacks.0.0.mlp"]
    assert linear.parent.parent.parent.path == "stacks.0"
    assert linear.root.path == ""
    assert sch.parent is None


def test_slices_are_lists_and_go_deeper(sch):
    layers = sch["stacks.0"][1:]
    assert isinstance(layers, ScheduleList)
    assert paths(layers) == ["stacks.0.1", "stacks.0.2"]
    assert paths(layers["mlp.0"]) == ["stacks.0.1.mlp.0", "stacks.0.2.mlp.0"]
    assert paths(sch["stacks"][::-1]) == ["stacks.1", "stacks.0"]
    assert paths(layers[::-1]) == ["stacks.0.2", "stacks.0.1"]
    assert layers[0].path == "stacks.0.1"
    assert paths(sch["stacks.0"][3:]) == []


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("stacks.*.*.norm", 6),
        ("stacks.0.*", 3),
        ("stacks.?.[02].norm", 4),
        ("stacks.*.[!0].mlp.*", 12),
        ("**.norm", 6),
        ("stacks.**.2", 8),
        ("**", 2 + 2 + 6 * 6 + 2),
        ("embed**", 1),
        ("**.embed*", 1),
    ],
)
def test_globs(sch, pattern, count):
    assert len(sch[pattern]) == count


def test_globs_start_at_the_module_and_lists_take_them(sch):
    assert paths(sch["stacks.1"]["*.norm"]) == [f"stacks.1.{i}.norm" for i in range(3)]
    assert paths(sch["stacks.*"]["1.mlp.[02]"]) == [f"stacks.{s}.1.mlp.{i}" for s in (0, 1) for i in (0, 2)]


names = st.lists(st.sampled_from(["a", "b", "ab", "0", "10"]), min_size=1, max_size=4)
parts = st.lists(st.sampled_from(["*", "**", "?", "a*", "*b", "[a0]", "[!a]", "a", "10"]), min_size=1, max_size=4)


@given(tree=st.lists(names, min_size=1, max_size=6), pattern=parts)
def test_a_glob_matches_as_its_parts_do_one_by_one(tree, pattern):
    """``**`` is worn out by every number of ``*`` in its place."""
    model = nn.Module()
    for path in tree:
        owner = model
        for name in path:
            if name not in owner._modules:
                owner.add_module(name, nn.Module())
            owner = owner._modules[name]
    schedule = megasched.create_schedule(model, ParallelDims())

    def expansions(rest):
        if not rest:
            yield ()
            return
        for tail in expansions(rest[1:]):
            for stars in range(5) if rest[0] == "**" else [None]:
                yield (("*",) * stars if stars is not None else (rest[0],)) + tail

    def matches(path):
        given_names = path.split(".")
        return any(
            len(plain) == len(given_names) and all(map(fnmatch.fnmatchcase, given_names, plain))
            for plain in expansions(pattern)
        )

    want = [path for path, _ in model.named_modules() if path and matches(path)]
    key = ".".join(pattern)
    if not any(sign in key for sign in "*?["):
        want = [key] if key in schedule else []
        found = [key] if key in schedule else []
    elif want:
        found = paths(schedule[key])
    else:
        with pytest.raises(ScheduleError, match="no module matches"):
            schedule[key]
        found = []
    assert found == want


def test_a_module_under_two_names_has_the_first(sch):
    assert sch["decoder.embed_tokens"] == sch["embed"]
    assert sch["decoder.embed_tokens"].path == "embed"
    assert paths(sch["decoder.*"]) == ["embed", "decoder.head"]
    assert paths(sch["**.embed*"]) == ["embed"]
    assert paths(sch["decoder"].children()) == ["embed", "decoder.head"]


def test_a_primitive_on_a_list_is_called_on_each_and_chains(sch):
    result = sch["stacks.*.*.mlp"]["0"].shard("weight", axis=0).annotate("weight", "kind", "up")
    assert isinstance(result, ScheduleList)
    assert [r.primitive for r in sch.records] == ["shard"] * 6 + ["annotate"] * 6
    assert sch["embed"].shard("weight", axis=0) == sch["embed"]


def test_roles():
    role = {
        f"stacks.{s}.{i}.mlp.{k}": r
        for s in range(2)
        for i in range(3)
        for k, r in ((0, "mlp.up"), (2, "mlp.down"))
    }
    sch = megasched.create_schedule(Model(), ParallelDims(), Roles(role | {"embed": "embed.tokens"}))
    assert paths(sch["stacks.1"].role("mlp.up")) == [f"stacks.1.{i}.mlp.0" for i in range(3)]
    assert len(sch.role("mlp.*")) == 12
    assert paths(sch["stacks"][:1].role("mlp.down")) == [f"stacks.0.{i}.mlp.2" for i in range(3)]
    assert paths(sch["decoder"].role("embed.tokens")) == ["embed"]
    assert sch.role_of("embed") == "embed.tokens"
    with pytest.raises(ScheduleError, match=re.escape("no module has the role 'qkv.q'")) as raised:
        sch["stacks"].role("qkv.q")
    assert problem_of(raised).remedy == "roles here: mlp.down, mlp.up"
    with pytest.raises(ValueError, match=r"unknown role .attn\.in"):
        Roles({"embed": "attn.in"})


def test_a_path_that_does_not_exist_suggests_one_that_does(sch):
    line = here(plus=2)
    with pytest.raises(ScheduleError) as raised:
        sch["stacks.0.0.mpl"]
    problem = problem_of(raised)
    assert problem.what == "no module 'stacks.0.0.mpl' in the model"
    assert problem.remedy.startswith("did you mean 'stacks.0.0.mlp'")
    assert problem.remedy.endswith("its children are: embed, stacks, decoder")
    assert problem.source == line


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (lambda sch: sch["stacks.0"]["3"], "no module '3' in stacks.0"),
        (lambda sch: sch["stacks.0"][3], "no child 3 in stacks.0"),
        (lambda sch: sch["stacks.0"][-4], "no child -4 in stacks.0"),
        (lambda sch: sch["layers.*"], "no module matches 'layers.*' in the model"),
        (lambda sch: sch["stacks.*"]["*.attention"], "no module matches '*.attention' in stacks.0"),
        (lambda sch: sch.role("mlp.up"), "no module has the role 'mlp.up'"),
    ],
)
def test_every_refusal_names_the_callers_line(sch, ask, what):
    with pytest.raises(ScheduleError) as raised:
        ask(sch)
    problem = problem_of(raised)
    assert problem.what == what
    assert problem.source == f"{__file__}:{ask.__code__.co_firstlineno}"


@pytest.mark.parametrize("target", [lambda sch: sch, lambda sch: sch["stacks.*"], lambda sch: sch["stacks"][5:]])
def test_an_unknown_primitive_is_an_attribute_error_on_lists_and_empty_lists_too(sch, target):
    with pytest.raises(AttributeError, match=r"'shrad' is no primitive.*list_primitives"):
        target(sch).shrad("weight", axis=0)
    assert not hasattr(target(sch), "__array__")


def test_the_model_is_not_touched(sch):
    before = {name: id(module) for name, module in sch.mod.named_modules()}
    sch["stacks.*.*.mlp.0"].shard("weight", axis=0)
    sch["stacks.0.0"].checkpoint().fork_rng()
    assert {name: id(module) for name, module in sch.mod.named_modules()} == before
    assert type(sch["stacks.0.0.mlp.0"].mod) is nn.Linear
    assert "forward" not in vars(sch["stacks.0.0"].mod)


def test_layouts_reach_the_schedule(sch):
    layout = ParallelDims(tensor_model_parallel_size=4)
    assert megasched.create_schedule(Model(), layout)["stacks.0"].layout is layout
    assert megasched.create_schedule(Model()).layout == ParallelDims()  # no process groups here
