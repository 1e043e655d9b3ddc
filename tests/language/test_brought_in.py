"""Calls on modules that replacements bring in, and on modules that they put inside of others."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import megasched
from megasched import ParallelDims, ScheduleError
from megasched.lowering.prepare import prepare
from megasched.plan.record_checks import follow
from megasched.trainer.session import open_session
from megasched.verify.ranks.pool import init_megatron
from tests.language.replacing import FUSED, Around, Fused, Scale, X, built, refused, schedule
from tests.language.sharding import column_row
from tests.lowering.models import Mlp, randomize, tiny_config
from tests.lowering.parity import distance, gathered_gradients, scheduled_copy, too_far


class Attention(nn.Module):
    """Four heads: [b, s, 8] -> [b, s, 8]."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.out = nn.Linear(8, 8)

    def attend(self, q, k, v):
        q, k, v = (x.unflatten(-1, (-1, 2)).transpose(1, 2) for x in (q, k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x):
        return self.attend(self.q(x), self.k(x), self.v(x))


class Packed(Attention):
    """One projection in place of three, as Slapo's schedules make it."""

    def __init__(self, old):
        super().__init__()
        del self.q, self.k, self.v
        self.qkv, self.out = nn.Linear(8, 24), old.out

    def forward(self, x):
        return self.attend(*self.qkv(x).chunk(3, dim=-1))


PACKED = {
    f"qkv.{name}": lambda old, name=name: torch.cat([old[f"{p}.{name}"] for p in "qkv"])
    for name in ("weight", "bias")
}


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


# cuts -------------------------------------------------------------------------------------------------


def inputs():
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(3))


def packed_on_rank():
    """One projection that a replacement has packed, cut between heads."""
    init_megatron(tp=2)
    model, x = randomize(nn.Sequential(Attention())), inputs()

    def fill(sch):
        sch["0"].replace(Packed, weights=PACKED)
        sch["0.qkv"].shard("weight", axis=0, components=(8, 8, 8))
        sch["0.out"].shard("weight", axis=1)

    made, plan, _ = scheduled_copy(model, fill, {"input": x})
    losses = [(each(x) * x).sum() for each in (made, model)]
    for loss in losses:
        loss.backward()
    gradients = gathered_gradients(made, plan)
    want = {
        f"0.qkv.{name}": torch.cat([getattr(model[0], p).get_parameter(name).grad for p in "qkv"])
        for name in ("weight", "bias")
    }
    want |= {f"0.out.{name}": held.grad for name, held in model[0].out.named_parameters()}
    far = {name: distance(gradients[name], grad) for name, grad in want.items()} | {"loss": distance(*losses)}
    return far, dict(plan.cuts), made[0].qkv.weight.shape


def test_a_packed_projection_is_cut_like_any(ranks):
    for far, cuts, shape in ranks.run(2, packed_on_rank):
        assert not too_far(far)
        assert cuts == {"0.qkv": "column", "0.out": "row"}
        assert shape == (12, 8)


ORDERS = {
    "cut, then wrapped": lambda sch: [column_row(sch), sch["0"].replace(Around)],
    "wrapped, then cut": lambda sch: [sch["0"].replace(Around), column_row(sch)],
    "each linear wrapped, then cut inside": lambda sch: [
        sch["0.up"].replace(Around),
        sch["0.down"].replace(Around),
        sch["0.up.inner"].shard("weight", axis=0),
        sch["0.down.inner"].shard("weight", axis=1),
    ],
    "what the user says of a sum follows": lambda sch: [
        column_row(sch),
        sch["0.down"].sync("fwd_post", "all_reduce"),
        sch["0.down"].replace(Around),
    ],
}


def order_on_rank(order):
    init_megatron(tp=2)
    model, x = randomize(nn.Sequential(Mlp())), inputs()
    made, plan, _ = scheduled_copy(model, ORDERS[order], {"input": x})
    losses = [(each(x) * x).sum() for each in (made, model)]
    for loss in losses:
        loss.backward()
    got = {name.replace("inner.", ""): grad for name, grad in gathered_gradients(made, plan).items()}
    far = {name: distance(got[name], held.grad) for name, held in model.named_parameters()}
    cuts = {path.replace(".inner", ""): cut for path, cut in plan.cuts.items()}
    return far | {"loss": distance(*losses)}, cuts, dict(plan.tp_facts.gather)


@pytest.mark.parametrize("order", ORDERS)
def test_a_wrapped_pair_is_cut_like_one_that_is_not(ranks, order):
    for far, cuts, gather in ranks.run(2, order_on_rank, order):
        assert not too_far(far)
        assert (cuts, gather) == ({"0.up": "column", "0.down": "row"}, {})


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


def _of_inner(make):
    return lambda old: make({name.replace("inner.", ""): value for name, value in old.items()})


# roles ------------------------------------------------------------------------------------------------


WRAPPED = """
from tests.language.replacing import Around
from megasched.model_adapters.default_schedule import schedule as auto


def schedule(sch, layout):
    auto(sch, layout)
    sch["model.layers.0.self_attn"].replace(Around)
    sch["model.layers.1.self_attn.k_proj"].replace(Around)
    sch["model.layers.1.mlp"].replace(Around)
"""


BASE = """
from tests.language.replacing import Around


def schedule(sch, layout):
    sch["model"].replace(Around)
"""


def test_what_an_adapter_knows_goes_where_the_module_goes(tmp_path):
    """Heads that fewer than TP ranks share, counts that are divided, MLPs, and names of weights."""
    (tmp_path / "wrapped.py").write_text(WRAPPED)
    tiny_config("llama").save_pretrained(tmp_path)
    layout = ParallelDims(tensor_model_parallel_size=4)
    plain, plan = (open_session(name, str(tmp_path), layout).plan for name in ("auto", f"{tmp_path}/wrapped.py"))

    def moved(path):
        path = path.replace("layers.0.self_attn", "layers.0.self_attn.inner")
        return path.replace("1.self_attn.k_proj", "1.self_attn.k_proj.inner").replace("1.mlp", "1.mlp.inner")

    assert plain.replicated_heads
    assert plan.replicated_heads == {moved(path): heads for path, heads in plain.replicated_heads.items()}
    assert plan.cuts == {moved(path): cut for path, cut in plain.cuts.items()}
    assert plan.roles.local_attributes == {moved(p): names for p, names in plain.roles.local_attributes.items()}
    assert plan.tp_facts.logits == plain.tp_facts.logits == {"lm_head"}
    assert plan.ends == plain.ends == ("model.embed_tokens", "lm_head")
    assert plan.roles.mlps.keys() == {moved(path) for path in plain.roles.mlps}
    assert plan.placements["model.layers.1.mlp.inner.up_proj.weight"].name == "model.layers.1.mlp.up_proj.weight"


def test_the_embedding_is_known_where_hf_does_not_find_it(tmp_path):
    """It looks for it in the base model. Megatron's optimizers treat embedding and head in ways of their own."""
    (tmp_path / "base.py").write_text(BASE)
    tiny_config("llama").save_pretrained(tmp_path)
    session = open_session(f"{tmp_path}/base.py", str(tmp_path), ParallelDims())
    with pytest.raises(NotImplementedError):
        session.replaced.get_input_embeddings()
    assert session.plan.ends == ("model.inner.embed_tokens", "lm_head")
