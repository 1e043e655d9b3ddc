"""Replace: the new module gets the old one's weights, hooks and place, or is refused; all or nothing."""

import copy

import pytest
import torch
from torch import nn

import megasched
from megasched import ParallelDims, ScheduleError
from megasched.verify.ranks.pool import init_megatron
from tests.lowering.models import Mlp, randomize, tiny_model, token_ids
from tests.lowering.parity import compare, scheduled_copy, too_far


class Scale(nn.Module):
    """RMS norm under names of its own."""

    def __init__(self, size):
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return self.gain * x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)


class Block(nn.Module):
    """A norm, a pair of linears, running statistics, an activation."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8, bias=False)
        self.mlp = Mlp()
        self.batch = nn.BatchNorm1d(8, affine=False)

    def forward(self, x):
        return self.mlp(self.norm(x))


class Fused(nn.Module):
    """Both linears of an Mlp in one parameter each."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(2, 16, 8))
        self.biases = nn.Parameter(torch.zeros(24))

    def forward(self, x):
        up = nn.functional.gelu(x @ self.weights[0].T + self.biases[:16])
        return up @ self.weights[1] + self.biases[16:]


FUSED = {
    "weights": lambda old: torch.stack([old["up.weight"], old["down.weight"].T]),
    "biases": lambda old: torch.cat([old["up.bias"], old["down.bias"]]),
}
X = torch.linspace(-1, 1, 24).reshape(3, 8)


@pytest.fixture
def model():
    return nn.Sequential(randomize(Block()), randomize(Block(), seed=8))


def schedule(model):
    return megasched.create_schedule(model, ParallelDims())


def built(model, fill, **arguments):
    sch = schedule(model)
    fill(sch)
    return megasched.build(sch, **arguments)


def refused(model, fill, **arguments):
    """The problems; checks that the model is what it was and that each names its line in this file."""
    before = dict(model.named_modules())
    parameters = {name: (id(p), dict(p.__dict__)) for name, p in model.named_parameters()}
    sch = schedule(model)
    fill(sch)
    with pytest.raises(ScheduleError) as raised:
        megasched.build(sch, **arguments)
    assert dict(model.named_modules()) == before
    assert {name: (id(p), dict(p.__dict__)) for name, p in model.named_parameters()} == parameters
    assert all(p.source in {r.source for r in sch.records} for p in raised.value.problems)
    return raised.value.problems


# weights ----------------------------------------------------------------------------------------------


def test_same_names_need_no_mapping(model):
    want, weight = model(X), model[0].mlp.up.weight
    built(model, lambda sch: sch["0.mlp.up"].replace(lambda old: nn.Linear(8, 16)))
    assert model[0].mlp.up.weight is weight
    assert torch.equal(model(X), want)


def test_renamed_and_an_instance(model):
    norm = model[0].norm.weight
    scale = Scale(8)
    built(model, lambda sch: sch["0.norm"].replace(scale, weights={"gain": "weight"}))
    assert model[0].norm is scale
    assert scale.gain is norm
    assert dict(model.named_parameters())["0.norm.gain"] is norm


def test_made_by_functions_of_the_old_ones(model):
    want = model(X)
    model[0].mlp.requires_grad_(False)
    built(model, lambda sch: sch["*.mlp"].replace(lambda old: Fused(), weights=FUSED))
    assert torch.allclose(model(X), want, rtol=1e-6)
    assert [p.requires_grad for p in model[0].mlp.parameters()] == [False, False]
    assert [p.requires_grad for p in model[1].mlp.parameters()] == [True, True]


def test_a_wrapper_holds_the_old_parameters_already(model):
    """New parameters come from functions that look at nothing; hooks run once, in the module that has them."""

    class Adapter(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            self.delta = nn.Parameter(torch.zeros(8, 16))

        def forward(self, x):
            return self.inner(x) + x @ self.delta

    calls = []
    up = model[0].mlp.up
    up.register_forward_hook(lambda module, args, output: calls.append(module))
    weights = {"delta": lambda old: torch.ones(8, 16)}
    built(model, lambda sch: sch["0.mlp.up"].replace(Adapter, weights=weights))
    assert model[0].mlp.up.inner is up
    assert model[0].mlp.up.delta.requires_grad
    model(X)
    assert calls == [up]


def test_ties_inside_and_outside_stay_ties(model):
    """A replaced side of a tie, and a module whose own two parameters are one."""
    model[1].mlp.up.weight = model[0].mlp.up.weight
    model[0].mlp.down.weight = nn.Parameter(model[0].mlp.up.weight.detach().T.clone())
    built(model, lambda sch: sch["0.mlp.up"].replace(lambda old: nn.Linear(8, 16)))
    assert model[1].mlp.up.weight is model[0].mlp.up.weight

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x))

    tied = nn.Sequential(Two())
    weight = tied[0].a.weight
    built(tied, lambda sch: sch["0"].replace(lambda old: Two()))
    assert tied[0].a.weight is tied[0].b.weight is weight
    built(tied, lambda sch: sch["0"].replace(lambda old: Two(), weights={"b.weight": "a.weight"}))
    assert tied[0].a.weight is tied[0].b.weight is weight


def test_persistent_buffers_are_carried(model):
    model[0].batch.running_mean.fill_(3.0)
    mean = model[0].batch.running_mean
    built(model, lambda sch: sch["0.batch"].replace(lambda old: nn.BatchNorm1d(8, affine=False)))
    assert model[0].batch.running_mean is mean


def test_attributes_of_parameters_and_annotations_go_where_the_parameter_goes(model):
    model[0].mlp.up.weight.mark = "own"

    def fill(sch):
        sch["0.mlp.up"].annotate("weight", "asked", 1)
        sch["0.norm"].annotate("weight", "asked", 2)
        sch["1.norm"].annotate("weight", "asked", 3)
        sch["0.mlp"].replace(lambda old: Fused(), weights=FUSED)
        sch["0.norm"].replace(lambda old: Scale(8), weights={"gain": "weight"})
        sch["1.norm"].replace(lambda old: nn.Identity(), drop=("weight",))

    built(model, fill)
    assert (model[0].mlp.weights.mark, model[0].mlp.weights.asked) == ("own", 1)
    assert not hasattr(model[0].mlp.biases, "asked")
    assert model[0].norm.gain.asked == 2


# hooks, mode ------------------------------------------------------------------------------------------


def test_hooks_of_both_sides_run_and_backward_hooks_too(model):
    calls = []

    def say(word):
        return lambda *args: calls.append(word)

    old, new = model[0].norm, nn.LayerNorm(8, bias=False)
    old.register_forward_pre_hook(say("old pre"))
    old.register_forward_hook(lambda module, args, kwargs, output: calls.append("old post"), with_kwargs=True)
    old.register_full_backward_hook(say("old backward"))
    old.register_full_backward_pre_hook(say("old backward pre"))
    new.register_forward_pre_hook(say("new pre"))
    new.register_forward_hook(say("new post"))

    def fill(sch):
        sch["0.norm"].replace(new)
        sch["0.norm"].hook("fw_post", say("asked post"))
        sch["0.norm"].hook("bw_post", say("asked backward"))

    built(model, fill)
    model(X).sum().backward()
    assert calls == [
        "new pre",
        "old pre",
        "new post",
        "old post",
        "asked post",
        "old backward pre",
        "old backward",
        "asked backward",
    ]


def test_training_mode_follows(model):
    model.eval()
    built(model, lambda sch: sch["0.mlp.drop"].replace(lambda old: nn.Sequential(nn.Dropout(0.5))))
    assert not model[0].mlp.drop[0].training


def test_a_module_under_two_names_is_replaced_under_both(model):
    model[1].norm = model[0].norm
    built(model, lambda sch: sch["1.norm"].replace(lambda old: Scale(8), weights={"gain": "weight"}))
    assert type(model[0].norm) is Scale
    assert model[1].norm is model[0].norm


# refusals ---------------------------------------------------------------------------------------------


class Other(nn.Module):
    def forward(self, hidden, mask):
        return hidden


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(3))
        self.register_buffer("running_var", torch.ones(8))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, x):
        return x


def raising(old):
    raise RuntimeError("no GPU")


@pytest.mark.parametrize(
    ("path", "factory", "more", "what"),
    [
        ("0.norm", lambda old: Scale(8), {}, "no weights for gain"),
        ("0.norm", lambda old: nn.Identity(), {}, "weights of the old module are lost: weight"),
        (
            "0.mlp",
            lambda old: Fused(),
            {"weights": {**FUSED, "bias": "up.bias"}},
            "no parameter of the new module: bias",
        ),
        ("0.mlp", lambda old: Fused(), {"weights": {"weights": FUSED["weights"]}}, "no weights for biases"),
        (
            "0.mlp",
            lambda old: Fused(),
            {"weights": {**FUSED, "biases": lambda old: torch.zeros(24)}},
            "weights of the old module are lost: up.bias, down.bias",
        ),
        (
            "0.mlp",
            lambda old: Fused(),
            {"weights": {**FUSED, "biases": lambda old: old["bias"]}},
            "raised KeyError",
        ),
        (
            "0.mlp",
            lambda old: Fused(),
            {"weights": {**FUSED, "biases": lambda old: old["up.bias"]}},
            "biases has shape [24]",
        ),
        ("0.mlp.up", lambda old: nn.Linear(8, 15), {}, "weight has shape [15, 8], its weights [16, 8]"),
        (
            "0.norm",
            lambda old: nn.Identity(),
            {"drop": ("weight", "bias")},
            "drop names nothing of the old module: bias",
        ),
        ("0.batch", lambda old: nn.Identity(), {}, "are lost: running_mean, running_var, num_batches_tracked"),
        ("0.batch", lambda old: Buffered(), {}, "buffer running_mean has shape [3], its values [8]"),
        (
            "0.norm",
            lambda old: Other(),
            {"drop": ("weight",)},
            "Other.forward can't take its parent's call: missing",
        ),
        ("0.norm", lambda old: 3, {}, "the factory returned int, not a module"),
        ("0.norm", raising, {}, "the factory raised RuntimeError: no GPU"),
        ("", lambda old: nn.Identity(), {}, "the whole model can't be replaced"),
    ],
)
def test_refused(model, path, factory, more, what):
    problems = refused(model, lambda sch: sch[path].replace(factory, **more))
    assert any(what in problem.what for problem in problems), problems
    assert {problem.module for problem in problems} == {path}


def test_dropped_by_name(model):
    built(
        model,
        lambda sch: [
            sch["0.norm"].replace(lambda old: nn.Identity(), drop=("weight",)),
            sch["0.batch"].replace(
                lambda old: nn.Identity(), drop=("running_mean", "running_var", "num_batches_tracked")
            ),
        ],
    )
    assert "0.norm.weight" not in dict(model.named_parameters())
    assert not dict(model[0].named_buffers())


def test_the_same_instance_twice(model):
    scale = Scale(8)
    (problem,) = refused(model, lambda sch: sch["*.norm"].replace(scale, weights={"gain": "weight"}))
    assert problem.what == "the same module instance already stands at 0.norm"
    assert problem.module == "1.norm"
    (problem,) = refused(model, lambda sch: sch["1.norm"].replace(model[0].norm))
    assert problem.what == "the same module instance already stands at 0.norm"


def test_one_module_twice_or_inside_one_that_is_gone(model):
    def twice(sch):
        sch["0.norm"].replace(lambda old: nn.LayerNorm(8, bias=False))
        sch["0.norm"].replace(lambda old: nn.LayerNorm(8, bias=False))

    (problem,) = refused(model, twice)
    assert problem.what == f"is replaced twice: at {__file__}:{twice.__code__.co_firstlineno + 1}, and again"

    def inside(sch):
        sch["0.mlp"].replace(lambda old: Fused(), weights=FUSED)
        sch["0.mlp.act"].replace(lambda old: nn.ReLU())

    (problem,) = refused(model, inside)
    assert problem.module == "0.mlp.act"
    assert "there is no such module any more" in problem.what


def test_the_inner_one_first_is_fine(model):
    def fill(sch):
        sch["0.mlp.up"].replace(lambda old: nn.Linear(8, 16))
        sch["0.mlp"].replace(lambda old: Fused(), weights=FUSED)

    assert type(built(model, fill)[0].mlp) is Fused


def test_one_bad_replacement_takes_the_good_ones_back(model):
    def fill(sch):
        sch["0.norm"].replace(lambda old: Scale(8), weights={"gain": "weight"})
        sch["1.norm"].replace(lambda old: Scale(8))
        sch["1.mlp"].replace(lambda old: nn.Identity())

    problems = refused(model, fill)
    assert [p.module for p in problems] == ["1.norm", "1.mlp"]


def test_a_later_refusal_takes_replacements_back(model):
    def fill(sch):
        sch["0.mlp"].replace(lambda old: Fused(), weights=FUSED)
        sch["0.mlp.up"].checkpoint()

    (problem,) = refused(model, fill)
    assert problem.what == "checkpoint: there is no such module any more after the replacements"
    assert problem.module == "0.mlp.up"


def test_the_call_that_the_parent_makes_is_known_from_example_inputs():
    """Optional in the old signature, used by the parent, absent in the new one."""

    class Masked(nn.Module):
        def forward(self, x, mask=None, **more):
            return x

    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Masked()

        def forward(self, x):
            return self.inner(x, mask=x > 0)

    fill = lambda sch: sch["inner"].replace(lambda old: nn.Identity())  # noqa: E731
    (problem,) = refused(Parent(), fill, inputs={"x": X})
    assert (
        problem.what == "Identity.forward can't take its parent's call: got an unexpected keyword argument 'mask'"
    )
    assert "(x, mask=None, **more)" in problem.remedy
    built(Parent(), fill)  # nobody can know


def test_an_hf_models_calls_are_known_without_inputs():
    model = tiny_model("llama")

    class Attention(nn.Module):
        def __init__(self, old):
            super().__init__()
            self.inner = old

        def forward(self, hidden_states, attention_mask=None):
            return self.inner(hidden_states, None, attention_mask)

    problems = refused(model, lambda sch: sch["**.self_attn"].replace(Attention))
    assert len(problems) == 2
    assert "got an unexpected keyword argument" in problems[0].what


def test_a_new_module_that_fails_inside_is_named():
    (problem,) = refused(
        nn.Sequential(nn.Linear(8, 8)),
        lambda sch: sch["0"].replace(
            lambda old: nn.Sequential(nn.Flatten(), nn.Linear(8, 8)),
            weights={"1.weight": "weight", "1.bias": "bias"},
        ),
        inputs={"input": torch.zeros(2, 3, 8)},
    )
    assert problem.what.startswith("the forward fails in a trial call on the meta device: RuntimeError")
    assert problem.module == "0.1"


# with other primitives --------------------------------------------------------------------------------


class Mine(nn.Module):
    """An Mlp of the user's, of the same names."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class Custom(nn.Linear):
    def forward(self, x):
        return super().forward(x)


def _with_shards():
    """Replaced and then sharded: as a whole, one child, a class that can't be sharded by one that can."""
    init_megatron(tp=2)
    x = {"x": X}
    found = {}

    def whole(sch):
        sch["mlp"].replace(lambda old: Mine())
        sch["mlp.up"].shard("weight", axis=0)
        sch["mlp.down"].shard("weight", axis=1)

    def child(sch):
        sch["mlp.up"].shard("weight", axis=0)
        sch["mlp.down"].shard("weight", axis=1)
        sch["mlp.up"].replace(lambda old: nn.Linear(8, 16))
        sch["norm"].replace(lambda old: Scale(8), weights={"gain": "weight"})

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(8, bias=False), Mlp()

        def forward(self, x):
            return self.mlp(self.norm(x))

    model = randomize(Wrapped())
    found["whole"] = too_far(compare(model, whole, x, x))
    model.mlp.up.requires_grad_(False)
    model.zero_grad()
    found["frozen"] = too_far(compare(model, whole, x, x))
    reference = randomize(Wrapped())
    reference.norm = Scale(8)
    reference.norm.gain.data.copy_(randomize(Wrapped()).norm.weight)
    built_, plan, _ = scheduled_copy(randomize(Wrapped()), child, x)
    found["child"] = torch.allclose(built_(X), reference(X), rtol=1e-5)
    found["placed"] = (plan.placement("norm", "gain").name, plan.placement("mlp.up", "weight").axis)
    custom = randomize(Wrapped())
    custom.mlp.up = Custom(8, 16)
    randomize(custom)

    def made_plain(sch):
        sch["mlp.up"].replace(lambda old: nn.Linear(8, 16))
        sch["mlp.up"].shard("weight", axis=0)
        sch["mlp.down"].shard("weight", axis=1)

    found["made plain"] = too_far(compare(custom, made_plain, x, x))
    return found


def test_replaced_modules_can_be_sharded(ranks):
    for found in ranks.run(2, _with_shards):
        assert found == {
            "whole": {},
            "frozen": {},
            "child": True,
            "placed": ("norm.gain", 0),
            "made plain": {},
        }


def _hf_norms():
    init_megatron(tp=2)
    from megasched.model_adapters.default_schedule import schedule as auto

    def fill(sch):
        auto(sch, sch.layout)
        sch.replace_all(
            type(sch["model.norm"].mod), lambda old: nn.RMSNorm(old.weight.shape[0], old.variance_epsilon)
        )
        sch["lm_head"].annotate("weight", "kind", "head")

    ids = token_ids()
    model = tiny_model("qwen3")
    gaps = too_far(compare(copy.deepcopy(model), fill, {"input_ids": ids, "labels": ids}))
    built_, plan, _ = scheduled_copy(model, fill)
    kinds = {type(m).__name__ for m in built_.modules() if "Norm" in type(m).__name__}
    partial = [n for n, p in plan.placements.items() if p.tp_gradient == "partial"]
    return (
        gaps,
        kinds,
        len(partial),
        built_.lm_head.weight.kind,
        built_.lm_head.weight is built_.model.embed_tokens.weight,
    )


def test_norms_of_an_hf_model_replaced_everywhere_at_tp2(ranks):
    """Those on heads are still partial, ties and annotations still there."""
    assert ranks.run(2, _hf_norms) == [({}, {"RMSNorm"}, 4, "head", True)] * 2
