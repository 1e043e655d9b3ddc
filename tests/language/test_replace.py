"""Replace: the new module gets the old one's weights, hooks and place."""

import copy

import torch
from torch import nn

from megasched.lowering.prepare import prepare
from megasched.verify.ranks.pool import init_megatron
from tests.language.replacing import FUSED, Around, Fused, Scale, X, built, schedule
from tests.lowering.models import Mlp, randomize, tiny_model, token_ids
from tests.lowering.parity import compare, scheduled_copy, too_far

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
    """What is made of trained and frozen ones is trained."""
    want = model(X)
    model[0].mlp.requires_grad_(False)
    model[1].mlp.up.requires_grad_(False)
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
            self.scale = nn.Parameter(torch.zeros(16), requires_grad=False)

        def forward(self, x):
            return self.inner(x) + x @ self.delta * self.scale

    calls = []
    up = model[0].mlp.up
    up.register_forward_hook(lambda module, args, output: calls.append(module))
    ones = torch.ones(8, 16)
    weights = {"delta": lambda old: ones, "scale": lambda old: ones[0]}
    built(model, lambda sch: sch["0.mlp.up"].replace(Adapter, weights=weights))
    assert model[0].mlp.up.inner is up
    assert model[0].mlp.up.delta.requires_grad
    assert not model[0].mlp.up.scale.requires_grad
    model[0].mlp.up.delta.data.zero_()
    assert ones.all()  # the function's own
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

    for weights in ({}, {"b.weight": "a.weight"}, {"b.weight": lambda old: old["b.weight"]}):
        tied = nn.Sequential(Two())
        weight = tied[0].a.weight
        built(tied, lambda sch, weights=weights: sch["0"].replace(lambda old: Two(), weights=weights))
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


def test_a_module_of_the_definition_keeps_its_mode(model):
    """A batch norm that is frozen in a block that trains, and a dropout that draws in one that evaluates."""

    class Dropped(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.drop = inner, nn.Dropout(0.0)

        def forward(self, x):
            return self.drop(self.inner(x))

    model.train()
    model[0].batch.eval()
    model[1].eval()
    model[1].mlp.drop.train()
    before = {module: module.training for module in model.modules()}
    built(model, lambda sch: sch["*"].replace(Dropped))
    assert {module: module.training for module in before} == before
    assert [model[0].drop.training, model[1].drop.training] == [True, False]
    assert [model[0].training, model[1].training] == [True, False]


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


def test_a_replacement_around_another_stands_for_the_parameters_of_the_definition(model):
    of_two = {
        "weights": lambda old: torch.stack([old["up.inner.weight"], old["down.weight"].T]),
        "biases": lambda old: torch.cat([old["up.inner.bias"], old["down.bias"]]),
    }
    sch = schedule(model)
    sch["0.mlp.up"].replace(Around)
    sch["0.mlp"].replace(Around)
    sch["1.mlp.up"].replace(Around)
    sch["1.mlp"].replace(lambda old: Fused(), weights=of_two)
    renamed = prepare(sch, model, inputs={"input": X}).replaced.renamed
    assert renamed == {
        f"0.mlp.inner.{now}.{name}": f"0.mlp.{then}.{name}"
        for now, then in (("up.inner", "up"), ("down", "down"))
        for name in ("weight", "bias")
    }
    assert sch.renamed["1.mlp.weights"] == ("1.mlp.up.weight", "1.mlp.down.weight")


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
    """ReplacedNames and then sharded: as a whole, one child, a class that can't be sharded by one that can."""
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
