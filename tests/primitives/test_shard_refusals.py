"""What can't be sharded is refused before anything changes, all of it in one report."""

import pytest
import torch
from torch import nn

import megasched
from megasched import ParallelDims, ScheduleError
from megasched.language.roles import Roles
from megasched.plan.make import make_plan
from megasched.verify.ranks.pool import init_megatron
from tests.lowering.models import Mlp, tiny_model

X = {"x": torch.zeros(1, 2, 8)}
IDS = {"input_ids": torch.zeros(1, 4, dtype=torch.long)}


class Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Raw(nn.Embedding):
    """Looks up in a way of its own."""

    def forward(self, ids):
        return self.weight[ids]


class Zoo(nn.Module):
    """One of each: [b, s] ids -> [b, s, 12]."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.raw = Raw(10, 8)
        self.normed = nn.Embedding(10, 8, max_norm=1.0)
        self.norm = nn.LayerNorm(8)
        self.mlp = Mlp()
        self.doubling = Doubling(8, 8)
        self.odd = nn.Linear(8, 9)
        self.head = nn.Linear(9, 12, bias=False)
        self.tied = nn.Linear(9, 12, bias=False)
        self.tied.weight = self.head.weight

    def forward(self, ids):
        x = self.doubling(self.mlp(self.norm(self.embed(ids) + self.raw(ids) + self.normed(ids))))
        return self.head(self.odd(x)) + self.tied(self.odd(x))


def refused(model, fill, layout=None, inputs=None, roles=None):
    """The problems of a schedule; checks that each says where and from which line of this file."""
    sch = megasched.create_schedule(model, layout or ParallelDims(tensor_model_parallel_size=2), roles)
    fill(sch)
    with pytest.raises(ScheduleError) as raised:
        make_plan(sch, inputs=inputs)
    for problem in raised.value.problems:
        assert problem.module
        assert problem.remedy
        assert problem.source in {r.source for r in sch.records}
        assert problem.source.startswith(f"{__file__}:")
    return raised.value.problems


@pytest.mark.parametrize(
    ("path", "arguments", "what"),
    [
        ("mlp.up", ("weights", 0), "Linear has no parameter 'weights'"),
        ("mlp", ("up.weight", 0), "Mlp has no parameter 'up.weight'"),
        ("mlp.act", ("weight", 0), "GELU has no parameter 'weight'"),
        ("mlp.up", ("weight", 2), "weight [16, 8] has no axis 2"),
        ("mlp.up", ("weight", -1), "weight [16, 8] has no axis -1"),
        ("mlp.up", ("weight", 0, (8, 4)), "components (8, 4) add up to 12, not to 16 along axis 0"),
        ("mlp.up", ("weight", 1, (4, 4)), "components are given for the inputs of a linear"),
        ("mlp.up", ("weight", 0, (13, 3)), "TP 2 does not divide weight [16, 8] along axis 0 (component of 13)"),
        ("mlp.up", ("bias", 0), "a bias is sharded alone"),
        ("norm", ("weight", 0), "LayerNorm.weight can't be sharded along axis 0"),
        ("embed", ("weight", 1), "what follows needs the whole of what is looked up"),
        ("raw", ("weight", 1), "Raw.weight can't be sharded along axis 1"),
        (
            "normed",
            ("weight", 0),
            "Embedding.weight can't be sharded along axis 0: a table that is cut is looked up in",
        ),
        ("doubling", ("weight", 0), "Doubling.weight can't be sharded along axis 0: it computes or holds more"),
        ("odd", ("weight", 0), "TP 2 does not divide weight [9, 8] along axis 0"),
        ("head", ("weight", 0), "head.weight is tied: head shards it, tied does not"),
        ("raw", ("weight", 0), "Raw.weight can't be sharded along axis 0: a table that is cut is looked up in"),
    ],
)
def test_one_by_one(path, arguments, what):
    model = Zoo()
    (problem, *more) = refused(model, lambda sch: sch[path].shard(*arguments), inputs={"ids": IDS["input_ids"]})
    assert what in problem.what
    assert problem.module == path
    # an uneven bias comes with its uneven weight
    assert all("bias" in other.what for other in more)


def test_no_parameter_at_all():
    sch = megasched.create_schedule(Zoo())
    with pytest.raises(ScheduleError, match="shard names no parameter, and would do nothing"):
        sch["mlp.up"].shard([], axis=0)


def test_everything_wrong_is_in_one_report():
    def fill(sch):
        sch["mlp.up"].shard("weight", axis=0)
        sch["mlp.up"].shard("weight", axis=1)
        sch["mlp.down"].shard("weights", axis=1)
        sch["norm"].shard("weight", axis=0)
        sch["odd"].shard("weight", axis=0)
        sch["head"].shard("weight", axis=0)
        sch["mlp.down"].sync("fwd_pots", "all_reduce")
        sch["mlp"].hook("fwd", print)

    problems = refused(Zoo(), fill)
    line = fill.__code__.co_firstlineno
    assert [(p.module, int(p.source.rpartition(":")[2]) - line) for p in problems] == [
        ("mlp.up", 2),
        ("mlp.down", 3),
        ("mlp.down", 7),
        ("mlp", 8),
        ("norm", 4),
        ("odd", 5),
        ("odd", 5),
        ("head", 6),
    ]
    assert f"weight is sharded twice: along axis 0 at {__file__}:{line + 1}" in problems[0].what
    report = str(ScheduleError(problems))
    assert report.startswith("the schedule has 7 problems:\n  - weight is sharded twice")
    assert (report.count("\n    asked for at: "), report.count("\n    module: ")) == (7, 6)  # odd's are one


def test_ties_cut_in_two_ways():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(8, 4)
            self.head = nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight

    def fill(sch):
        sch["head"].shard("weight", axis=1)
        sch["embed"].shard("weight", axis=0)

    (problem,) = refused(Tied(), fill)
    assert problem.what == "embed.weight is tied, and cut in another way at its other side: along axis 0"
    assert problem.module == "head"


def test_the_bias_of_a_row_is_whole():
    def fill(sch):
        sch["mlp.down"].shard("weight", axis=1)
        sch["mlp.down"].shard("bias", axis=0)

    (problem,) = refused(Zoo(), fill, inputs={"ids": IDS["input_ids"]})
    assert problem.what == "the bias of a row-parallel linear is whole on every rank"


def test_a_bias_beside_its_columns_says_nothing_new():
    sch = megasched.create_schedule(Mlp(), ParallelDims(tensor_model_parallel_size=2))
    sch["up"].shard("bias", axis=0)
    sch["up"].shard("weight", axis=0)
    sch["down"].shard("weight", axis=1)
    plan = make_plan(sch)
    assert plan.placement("up", "bias").axis == 0
    assert plan.placement("down", "bias").axis is None


def shard_attention(sch):
    for name in ("q_proj", "k_proj", "v_proj"):
        sch[f"model.layers.*.self_attn.{name}"].shard("weight", axis=0)
    sch["model.layers.*.self_attn.o_proj"].shard("weight", axis=1)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "what", "count"),
    [
        (4, 4, 8, "TP 8 does not divide 4 heads of", 4),  # k and v would be replicated, q can't
        (6, 3, 2, "TP 2 does not divide 3 heads of qkv", 4),
        (6, 2, 3, "TP 3 does not divide 2 heads of qkv", 4),
        (6, 6, 4, "TP 4 does not divide 6 heads of", 8),
    ],
)
def test_tp_that_cuts_through_heads(heads, kv_heads, tp, what, count):
    """Their sizes would divide: 8 features a head."""
    model = tiny_model(
        "llama", hidden_size=8 * heads, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=8
    )
    problems = refused(model, shard_attention, ParallelDims(tensor_model_parallel_size=tp), inputs=IDS)
    assert len(problems) == count
    assert all(what in p.what for p in problems)
    assert all(p.remedy.startswith("a tensor parallel size that divides") for p in problems)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "what"),
    [
        (6, 3, 2, "TP 2 does not divide 3 heads of qkv.packed"),
        (6, 2, 4, "TP 4 does not divide 6 query heads"),  # k and v would be replicated
    ],
)
def test_tp_that_cuts_through_packed_heads(heads, kv_heads, tp, what):
    model = tiny_model("phi3", hidden_size=48, num_attention_heads=heads, num_key_value_heads=kv_heads)
    layout = ParallelDims(tensor_model_parallel_size=tp)
    problems = refused(model, lambda sch: sch.role("qkv.packed").shard("weight", axis=0), layout, inputs=IDS)
    assert {p.what for p in problems} == {what}


def test_attributes_that_count_and_are_not_there_or_do_not_divide():
    def fill(sch):
        sch["mlp.up"].shard("weight", axis=0)
        sch["mlp.down"].shard("weight", axis=1)

    model = nn.ModuleDict({"mlp": Mlp()})
    model["mlp"].features = 15
    roles = Roles(local_attributes={"mlp": ("features", "heads")})
    problems = refused(model, fill, roles=roles)
    assert [p.what for p in problems] == [
        "TP 2 does not divide features = 15",
        "has no attribute heads, which its adapter divides by TP",
    ]


def test_components_of_an_adapter_that_do_not_add_up():
    roles = Roles({"up": "qkv.packed"}, components={"up": (8, 4)})
    (problem,) = refused(Mlp(), lambda sch: sch["up"].shard("weight", axis=0), roles=roles)
    assert problem.what == "up.weight: components (8, 4) do not add up to [16, 8]"


def test_without_inputs_only_pairs_that_speak_for_themselves():
    class Pair(nn.Module):
        def __init__(self, **more):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
            for name, module in more.items():
                self.add_module(name, module)

        def forward(self, x):
            return self.down(self.up(x).tanh())

    def pair(sch):
        sch["up"].shard("weight", axis=0)
        sch["down"].shard("weight", axis=1)

    make_plan(_filled(Pair(), pair))
    make_plan(_filled(Pair(act=nn.GELU(), drop=nn.Dropout(0.0)), pair))
    (problem,) = refused(Pair(drop=nn.Dropout(0.1)), pair)
    assert problem.what == "Dropout 'drop' stands beside it, and nothing tells whether it meets the sharded output"
    (problem,) = refused(Pair(norm=nn.LayerNorm(16)), pair)
    assert problem.what.startswith("LayerNorm 'norm' stands beside it")
    (problem,) = refused(Pair(), lambda sch: sch["up"].shard("weight", axis=0))
    assert problem.what.startswith("Linear 'down' stands beside it") or problem.what.startswith(
        "nothing tells where"
    )
    assert 'sync("fwd_post", "all_gather")' in problem.remedy
    (problem,) = refused(Pair(), lambda sch: sch["down"].shard("weight", axis=1))
    assert problem.what.startswith("nothing tells whether its input is sharded")
    assert 'sync("fwd_pre", "scatter")' in problem.remedy


def halves(module, x):
    gate, up = module.up(x).chunk(2, dim=-1)
    return module.down(torch.cat([gate * up, gate], dim=-1))


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (halves, "the forward of Code needs up otherwise"),
        (lambda module, x: module.down(module.up(x).softmax(-1)), "the forward of Code needs up otherwise"),
        (lambda module, x: (module.down(module.up(x)), module.up(x)), "the forward of Code needs up otherwise"),
        (lambda module, x: module.up(x) + module.down(x.repeat(1, 1, 2)).sum(), "the forward of Code needs"),
        (lambda module, x: module.down(module.up(x) / module.up(x).shape[-1]), "the forward of Code needs up"),
        (lambda module, x: module.down(module.up(x).view(9, 16)), "the forward fails in a trial call"),
    ],
    ids=["halves", "softmax", "also out", "not into the row", "by its width", "of other inputs"],
)
def test_without_inputs_the_code_between_a_pair_is_looked_at(code, why):
    class Code(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            return code(self, x)

    def pair(sch):
        sch["0.up"].shard("weight", axis=0)
        sch["0.down"].shard("weight", axis=1)

    (problem,) = refused(nn.Sequential(Code()), pair)
    assert problem.what.startswith(f"nothing tells that its output goes to a row-parallel linear alone: {why}")
    assert problem.module == "0.up"


def test_without_inputs_a_statement_does():
    def fill(sch):
        sch["up"].shard("weight", axis=0).sync("fwd_post", "all_gather")
        sch["down"].shard("weight", axis=1).sync("fwd_pre", "scatter")

    plan = make_plan(_filled(Mlp(dropout=0.1), fill))
    assert (plan.tp_facts.gather.keys(), plan.tp_facts.scatter) == ({"up"}, {"down"})


def test_a_forward_that_fails_in_the_trial_call_names_the_module():
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = Mlp()

        def forward(self, x):
            return self.mlp(x, x)

    (problem,) = refused(Picky(), lambda sch: sch["mlp.up"].shard("weight", axis=0), inputs=X)
    assert "the forward fails in a trial call on the meta device: TypeError" in problem.what
    assert problem.module == "mlp"


def _filled(model, fill):
    sch = megasched.create_schedule(model, ParallelDims(tensor_model_parallel_size=2))
    fill(sch)
    return sch


def _refused_at_build():
    """A model with everything wrong, after build refused it: what it was, and what it computes."""
    init_megatron(tp=2)
    model = tiny_model("llama")
    ids = torch.arange(4, 20).reshape(2, 8)
    want = model(ids).logits
    state = {name: value.clone() for name, value in model.state_dict().items()}
    modules = dict(model.named_modules())
    sch = megasched.create_schedule(model)
    sch["model.layers.*.mlp.act_fn"].replace(lambda old: nn.SiLU())
    shard_attention(sch)
    sch["model.norm"].shard("weight", axis=0)
    sch["model.layers.0"].checkpoint().hook("nowhere", print)
    with pytest.raises(ScheduleError) as raised:
        megasched.build(sch)
    return {
        "problems": len(raised.value.problems),
        "modules": dict(model.named_modules()) == modules,
        "values": all(torch.equal(value, state[name]) for name, value in model.state_dict().items()),
        "forwards": [path for path, module in model.named_modules() if "forward" in vars(module)],
        "hooks": [p for p, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks],
        "attention": model.config._attn_implementation,
        "use_cache": model.config.use_cache,
        "logits": torch.equal(model(ids).logits, want),
        "grads": [n for n, p in model.named_parameters() if p.grad is not None or p._backward_hooks],
    }


def test_a_refused_model_is_what_it_was(ranks):
    for found in ranks.run(2, _refused_at_build):
        assert found == {
            "problems": 2,
            "modules": True,
            "values": True,
            "forwards": [],
            "hooks": [],
            "attention": "sdpa",
            "use_cache": True,
            "logits": True,
            "grads": [],
        }


@pytest.mark.parametrize(("axis", "stated"), [(0, ("fwd_post", "all_gather")), (1, ("fwd_pre", "scatter"))])
def test_a_weight_that_a_module_around_reads_is_refused_without_inputs(axis, stated):
    """Torch's attention multiplies by the weight of its projection, which it never calls."""
    model = nn.Sequential(nn.MultiheadAttention(8, 2))
    sch = megasched.create_schedule(model, megasched.ParallelDims(tensor_model_parallel_size=2))
    sch["0.out_proj"].shard("weight", axis=axis).sync(*stated)
    with pytest.raises(megasched.ScheduleError, match="its weight is read by code other than its own, of 0"):
        make_plan(sch)


class Zeroed(Mlp):
    """Code that fills a weight when the module is made has done so before it is cut."""

    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.down.weight)


def test_a_weight_that_is_only_initialized_by_others_is_cut():
    sch = megasched.create_schedule(Zeroed(), megasched.ParallelDims(tensor_model_parallel_size=2))
    sch["up"].shard("weight", axis=0)
    sch["down"].shard("weight", axis=1)
    assert make_plan(sch).cuts == {"up": "column", "down": "row"}
