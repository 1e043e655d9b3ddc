"""Calls on modules that replacements bring in, and on modules that they put inside of others."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import megasched
from megasched import ScheduleError
from megasched.lowering.prepare import prepare
from megasched.plan.record_checks import follow
from tests.language.replacing import FUSED, Around, Doubled, Fused, Scale, X, built, refused, schedule
from tests.lowering.models import Mlp

# names ------------------------------------------------------------------------------------------------


def test_what_a_replacement_brings_in_has_a_schedule(model):
    sch = schedule(model)
    assert "0.mlp.inner" not in sch
    sch["*.mlp"].replace(Around)
    inner = sch["0.mlp"]["inner"]
    assert ("0.mlp.inner.up" in sch, "inner" in sch["1.mlp"], "0.mlp.other" in sch) == (True, True, False)
    assert (inner.path, type(inner.mod), inner.parent, inner.root) == ("0.mlp.inner", Mlp, sch["0.mlp"], sch)
    assert inner.mod is not model[0].mlp
    assert next(inner.mod.parameters()).is_meta
    assert [node.path for node in inner] == [f"0.mlp.inner.{name}" for name in ("up", "act", "drop", "down")]
    assert [node.path for node in sch["*.mlp.inner.up"]] == ["0.mlp.inner.up", "1.mlp.inner.up"]
    assert [node.path for node in sch["**.down"]] == ["0.mlp.inner.down", "1.mlp.inner.down"]
    assert sch["0.mlp.up"].mod is model[0].mlp.up  # of the definition, which has not changed
    assert list(sch.below())[:3] == ["0", "0.norm", "0.mlp"]
    assert not [name for name in sch.below() if "inner" in name]


def test_a_glob_takes_the_definition_where_nothing_else_matches(model):
    sch = schedule(model)
    sch["0.norm"].replace(lambda old: Scale(8), weights={"gain": "weight"})
    sch["0.mlp"].replace(lambda old: Fused(), weights=FUSED)
    assert [node.path for node in sch["0.mlp.*"]] == [f"0.mlp.{name}" for name in ("up", "act", "drop", "down")]


def test_one_module_under_two_names_has_the_first(model):
    class Twice(Around):
        def __init__(self, inner):
            super().__init__(inner)
            self.again = inner

    sch = schedule(model)
    sch["0.mlp"].replace(Twice)
    assert sch["0.mlp.again.up"].path == "0.mlp.inner.up"


def test_the_trial_of_a_replacement_leaves_no_trace(model):
    """Neither in the model, nor in an instance that is to be put in, nor in the random numbers."""

    class Drawn(Around):
        def __init__(self, inner):
            super().__init__(inner)
            self.first = torch.rand(1)
            inner.seen = True

    whole, instance = dict(model.named_modules()), Around(nn.GELU())
    state, sch = torch.get_rng_state(), schedule(model)
    sch["0.mlp"].replace(Drawn)
    sch["1.mlp.act"].replace(instance)
    sch["1.mlp.act.inner"].replace(lambda old: nn.ReLU())
    assert sch["0.mlp.inner"].mod.seen
    assert type(sch["1.mlp.act.inner"].mod) is nn.ReLU
    assert torch.equal(torch.get_rng_state(), state)
    assert dict(model.named_modules()) == whole
    assert not hasattr(model[0].mlp, "seen")
    assert type(instance.inner) is nn.GELU


# builds -----------------------------------------------------------------------------------------------


def test_calls_on_what_is_brought_in_are_carried_out(model):
    calls = []

    def fill(sch):
        sch["0.mlp"].replace(Around)
        sch["0.mlp.inner.up"].replace(Around)
        sch["0.mlp.inner.up.inner"].hook("fw_post", lambda *call: calls.append(call[0]))
        sch["0.norm"].replace(lambda old: Scale(8), weights={"gain": "weight"})
        sch["0.norm"].annotate("gain", "asked", 1)
        sch["1.norm"].replace(Around)
        sch["1.norm.inner"].annotate("weight", "asked", 2)

    built(model, fill)
    model(X)
    assert calls == [model[0].mlp.inner.up.inner]
    assert (model[0].norm.gain.asked, model[1].norm.inner.weight.asked) == (1, 2)


def test_a_built_model_is_not_tried_again(model):
    sch = schedule(model)
    sch["0.mlp"].replace(Around)
    megasched.build(sch)
    assert "0.mlp.inner.inner" not in sch
    assert "0.mlp.inner" not in sch  # which nobody has asked for before


def test_calls_follow_a_module_into_one_that_replaces_it(model):
    calls = []

    def fill(sch):
        sch["0.mlp.up"].hook("fw_post", lambda *call: calls.append("up"))
        sch["0.mlp.down"].annotate("weight", "asked", 1)
        sch["0.mlp"].hook("fw_post", lambda *call: calls.append("mlp"))
        sch["0.mlp"].replace(Around)

    built(model, fill)
    model(X)
    assert calls == ["up", "mlp"]
    assert model[0].mlp.inner.down.weight.asked == 1


def test_names_after_replacements(model):
    """Modules that moved, and one whose parameters have all gone to another."""

    class Other(nn.Module):
        def __init__(self, old):
            super().__init__()
            self.first, self.last = old.up, nn.Linear(16, 8)

        def forward(self, x):
            return self.last(F.gelu(self.first(x)))

    sch = schedule(model)
    sch["0.mlp"].replace(Other, weights={"last.weight": "down.weight", "last.bias": "down.bias"})
    sch["1.norm"].replace(Around)
    names = prepare(sch, copy.deepcopy(model), inputs={"input": X}).replaced
    assert names.moved == {"0.mlp.up": "0.mlp.first", "1.norm": "1.norm.inner"}
    assert names.heirs == {"0.mlp.down": "0.mlp.last"}
    assert names.renamed["1.norm.inner.weight"] == "1.norm.weight"
    assert names.renamed["0.mlp.last.bias"] == "0.mlp.down.bias"
    assert [names.home(path) for path in ("0.mlp.up", "0.mlp.down", "0.norm")] == [
        *("0.mlp.first", "0.mlp.last", "0.norm"),
    ]


def test_a_sum_is_of_the_module_that_stood_there_when_it_was_asked_for(model):
    sch = schedule(model)
    sch["0.mlp.down"].sync("fwd_post", "all_reduce")
    sch["0.mlp.down"].replace(Around)
    sch["0.mlp.down"].sync("bwd_post", "all_reduce")
    made = prepare(sch, copy.deepcopy(model), inputs={"input": X})
    found = [(record.primitive, record.path) for record in follow(sch, made.replaced, made.model)]
    assert found == [("sync", "0.mlp.down.inner"), ("replace", "0.mlp.down"), ("sync", "0.mlp.down")]


def test_buffers_inside_of_a_new_module_are_kept_and_known(model):
    """Running statistics; the new module has them where it has the old one."""
    mean = model[0].batch.running_mean
    sch = schedule(model)
    sch["0.batch"].replace(Around)
    names = prepare(sch, copy.deepcopy(model), inputs={"input": X}).replaced
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    assert names.renamed == {f"0.batch.inner.{name}": f"0.batch.{name}" for name in statistics}
    megasched.build(sch)
    assert model[0].batch.inner.running_mean is mean


def test_a_tied_parameter_has_its_first_name(model):
    model[1].mlp.up.weight = model[0].mlp.up.weight
    sch = schedule(model)
    sch["*.mlp.up"].replace(Around)
    renamed = prepare(sch, model, inputs={"input": X}).replaced.renamed
    assert renamed["1.mlp.up.inner.weight"] == renamed["0.mlp.up.inner.weight"] == "0.mlp.up.weight"


# refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda node: node["up"].adapt(rank=2),
        lambda node: node.trace(),
        lambda node: node.find("add"),
        lambda node: node.replace_all(nn.GELU, lambda old: nn.ReLU()),
        lambda node: node.cut_pipeline_stage(),
    ],
)
def test_what_needs_a_module_of_the_definition_is_refused(model, call):
    sch = schedule(model)
    sch["0.mlp"].replace(Around)
    with pytest.raises(ScheduleError, match=r"a replacement brings this module in, and \w+ is of mod"):
        call(sch["0.mlp.inner"])


def test_a_name_that_nothing_brings_in(model):
    def broken(old):
        return nn.Linear(8, round(float(old.up.weight.sum())))

    sch = schedule(model)
    sch["0.mlp"].replace(Around)
    with pytest.raises(ScheduleError, match=r"no module 'inner.dow' in 0\.mlp\n(.|\n)*did you mean 'inner.down'"):
        _ = sch["0.mlp"]["inner.dow"]
    sch["1.mlp"].replace(broken)
    with pytest.raises(
        ScheduleError, match=r"the replacement of 1\.mlp was tried on meta, without values, and rai"
    ):
        _ = sch["1.mlp.inner"]


def test_checks_are_of_the_module_that_stands_there(model):
    def fill(sch):
        sch["0.norm"].replace(lambda old: Scale(8), weights={"gain": "weight"})
        sch["0.norm"].shard("gain", axis=3)
        sch["1.norm"].shard("gain", axis=0)

    gain, norm = refused(model, fill)
    assert (gain.module, gain.what) == ("0.norm", "gain [8] has no axis 3")
    assert (norm.module, norm.what) == ("1.norm", "LayerNorm has no parameter 'gain'")


def test_calls_on_what_is_gone_again_are_refused(model):
    """By one replacement the module came, by another it went; a probe on one that is gone is refused, too."""

    def fill(sch):
        sch["0.mlp.up"].replace(Around)
        sch["0.mlp.up.inner"].checkpoint()
        sch["0.mlp.up.inner"].replace(Around)
        sch["0.mlp.act"].probe()
        sch["0.mlp"].replace(lambda old: Fused(), weights={n: _of_inner(f) for n, f in FUSED.items()})

    problems = refused(model, fill)
    assert [(p.module, p.what) for p in problems] == [
        ("0.mlp.up.inner", "checkpoint: there is no such module any more after the replacements"),
        ("0.mlp.act", "probe: there is no such module any more after the replacements"),
    ]


def test_a_graph_of_what_another_class_replaces_is_refused(model):
    """Its operations have other names there; a module of the same class has the same."""

    def fill(sch):
        for path in ("0.mlp", "1.mlp"):
            sch[path].trace(inputs={"x": X})
            sch[path].checkpoint(sch[path].find("act.gelu")[0])
        sch["0.mlp"].replace(Around)
        sch["1.mlp"].replace(copy.deepcopy)

    (problem,) = refused(model, fill)
    assert problem.module == "0.mlp"
    assert problem.what == "trace: its graph is of the definition's Mlp, which Around replaces"


def test_an_edit_of_what_another_class_computes_is_refused(model):
    """The graph of a run has the operations of that class."""

    def fill(sch):
        for path, operation in (("0.mlp", "up"), ("1.mlp", "act.gelu")):
            sch[path].trace(inputs={"x": X})
            sch[path].checkpoint(sch[path].find(operation)[0])
        sch["0.mlp.up"].replace(Around)
        sch["1.mlp.act"].replace(Around)

    assert [(problem.module, problem.what) for problem in refused(model, fill)] == [
        ("0.mlp", "checkpoint: up is of the definition's Linear, which Around replaces"),
        ("1.mlp", "checkpoint: act.gelu is of the definition's GELU, which Around replaces"),
    ]


def test_an_edit_of_a_graph_that_is_gone_is_refused(model):
    def fill(sch):
        sch["0.mlp"].trace(inputs={"x": X})
        sch["0.mlp"].replace(lambda old: old, subgraph=sch["0.mlp"].find("act.gelu")[0])
        sch["0"].replace(Around)

    assert [(problem.module, problem.what) for problem in refused(model, fill)] == [
        ("0.mlp", "trace: there is no such module any more after the replacements")
    ]


def test_edits_are_made_beside_what_another_class_computes(model):
    """Of calls that stay calls, and of operations of what stays."""

    def fill(sch):
        sch["0.mlp"].trace(inputs={"x": X})
        sch["0.mlp"].checkpoint(sch["0.mlp"].find("up")[0] | sch["0.mlp"].find("act.gelu")[0])
        sch["0.mlp.up"].replace(lambda old: Doubled(8, 16))
        sch["0.mlp.down"].replace(Around)
        sch["1.mlp"].trace(leaves=["act"], inputs={"x": X})
        sch["1.mlp"].checkpoint(sch["1.mlp"].find("act")[0])
        sch["1.mlp.act"].replace(Around)

    want = copy.deepcopy(model)
    want[0].mlp.up = Doubled(8, 16)
    want[0].mlp.up.load_state_dict(model[0].mlp.up.state_dict())
    result = built(model, fill)(X)
    torch.testing.assert_close(result, want(X), rtol=0, atol=0)


def _of_inner(make):
    return lambda old: make({name.replace("inner.", ""): value for name, value in old.items()})
