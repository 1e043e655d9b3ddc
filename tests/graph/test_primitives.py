"""The primitives on graphs: what they record, what they do, and what they refuse."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import megasched
from megasched import ScheduleError, Subgraph
from megasched.graph import patterns, traced
from megasched.language.parallel_dims import ParallelDims
from megasched.plan.make import make_plan
from tests.lowering.models import Mlp, randomize, tiny_model, token_ids

X = torch.linspace(-1, 1, 48).reshape(2, 3, 8)
INPUTS = {"x": torch.empty(2, 3, 8)}


def schedule(model=None, decompose=()):
    sch = megasched.create_schedule(nn.Sequential(model if model is not None else randomize(Mlp())))
    for name in decompose:
        sch["0"][name].decompose()
    sch["0"].trace(inputs=INPUTS)
    return sch


def backward(model, x=X):
    model.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    output = model(x)
    output.square().sum().backward()
    return [output.detach(), x.grad, *(p.grad for p in model.parameters())]


def alike(one, two, tolerance=0.0):
    return all((a - b).abs().max() <= tolerance for a, b in zip(one, two, strict=True))


def refusal(call, *args, **kwargs):
    with pytest.raises(ScheduleError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def test_nothing_changes_before_build_and_records_are_plain(tmp_path):
    sch = schedule()
    part = sch["0"].find(patterns.gelu)[0]
    sch["0"].fuse(part)
    assert "forward" not in vars(sch.mod[0])
    megasched.save_records(sch.records, tmp_path / "records.json")
    loaded = megasched.load_records(tmp_path / "records.json")
    assert loaded == sch.records
    again = megasched.create_schedule(copy.deepcopy(sch.mod))
    megasched.replay(loaded, again)
    assert again.records == sch.records


def test_names_are_those_of_the_modules():
    sch = schedule(decompose=["up"])
    names = [part.nodes[0] for part in sch["0"].find(".*")]
    assert names == ["up.t", "up.matmul", "up.add", "act.gelu", "drop.dropout", "down"]
    assert sch["0"].find(patterns.bias_gelu)[0].inputs == ("up.matmul", "up.bias")


def test_flatten_false_keeps_children_and_leaves_are_named_or_typed():
    for options in ({"flatten": False}, {"leaves": ["act", "drop"]}, {"leaves": [nn.GELU, r"dr.p"]}):
        sch = megasched.create_schedule(nn.Sequential(Mlp()))
        sch["0"].trace(inputs=INPUTS, **options)
        assert [part.nodes[0] for part in sch["0"].find(".*")] == ["up", "act", "drop", "down"]
    assert "leaves: nothing below" in refusal(sch["0"].trace, leaves=["actt"], inputs=INPUTS)


@pytest.mark.parametrize("bias", [True, False])
def test_decomposed_linears_compute_the_same(bias):
    model = randomize(Mlp(bias=bias))
    want = backward(copy.deepcopy(model))
    built = megasched.build(schedule(model, ["up", "down"]))
    assert alike(backward(built), want, 1e-5)


def test_replace_runs_something_else_on_the_inputs_in_order():
    model = randomize(Mlp())
    want = backward(copy.deepcopy(model))
    sch = schedule(model, ["up"])
    seen = []

    def factory(old):
        assert [n.op for n in old.graph.nodes].count("placeholder") == 2
        return lambda x, bias: seen.append(tuple(bias.shape)) or F.gelu(x + bias)

    sch["0"].replace(factory, subgraph=sch["0"].find(patterns.bias_gelu)[0])
    assert alike(backward(megasched.build(sch)), want, 1e-5)
    assert seen == [(16,)]


def test_checkpoint_of_a_part_is_bit_equal_and_runs_twice():
    model = randomize(Mlp(dropout=0.5))
    runs = []
    for recomputed in (False, True):
        sch = schedule(copy.deepcopy(model))
        if recomputed:
            sch["0"].checkpoint(sch["0"].find("act.*")[0] | sch["0"].find("drop.*")[0])
        built = megasched.build(sch)
        torch.manual_seed(1)
        runs.append(backward(built))
    assert alike(*runs)


def test_inductor_computes_the_same_and_tells_when_it_compiles_often(compiling):
    model = randomize(Mlp())
    want = backward(copy.deepcopy(model))
    sch = schedule(model, ["up"])
    sch["0"].fuse(sch["0"].find(patterns.bias_gelu)[0], compiler="inductor")
    built = megasched.build(sch)
    assert alike(backward(built), want, 1e-5)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for length in range(4, 9):
            built(torch.zeros(2, length, 8))
    assert any("was compiled more than 4 times" in str(warning.message) for warning in told)


def test_more_than_a_few_shapes_are_reported_once():
    built = megasched.build(schedule())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for length in range(1, 13):
            assert built(torch.zeros(2, length, 8)).shape == (2, length, 8)
    assert sum("forms of call" in str(warning.message) for warning in told) == 1


def test_dropout_draws_in_training_and_not_in_evaluation():
    built = megasched.build(schedule(randomize(Mlp(dropout=0.5))))
    assert not torch.equal(built(X), built(X))
    built.eval()
    assert torch.equal(built(X), built(X))
    with torch.no_grad():
        assert not built(X).requires_grad


def test_parameters_are_read_when_it_runs_and_hooks_of_leaves_run():
    built = megasched.build(schedule())
    calls = []
    first = built(X)
    built[0].down.register_forward_hook(lambda *a: calls.append(1))
    with torch.no_grad():
        built[0].down.bias.add_(1.0)
    assert torch.allclose(built(X), first + 1.0, atol=1e-6)
    assert calls == [1]
    assert built.to(torch.bfloat16)(X.bfloat16()).dtype == torch.bfloat16


def test_a_recomputed_traced_module_is_bit_equal():
    runs = []
    for recomputed in (False, True):
        sch = schedule(randomize(Mlp(dropout=0.5)))
        if recomputed:
            sch["0"].checkpoint()
        built = megasched.build(sch)
        torch.manual_seed(1)
        runs.append(backward(built))
    assert alike(*runs)


def test_trace_until_shows_the_calls_of_layers_and_computes_the_same():
    model, ids = tiny_model("llama"), token_ids()
    model.config.use_cache = False
    want = model(input_ids=ids, labels=ids).loss
    sch = megasched.create_schedule(model)
    sch["model"].trace_until("layers.*")
    assert len(sch["model"].find(r"layers\.\d")) == 2
    assert torch.equal(megasched.build(sch)(input_ids=ids, labels=ids).loss, want)
    sch = megasched.create_schedule(tiny_model("llama"))
    sch["model"].trace_until(lambda path, module: path.endswith("mlp"))
    assert sch.records[0].arguments["leaves"] == ("layers.0.mlp", "layers.1.mlp")


def test_a_list_finds_in_each_of_its_modules():
    sch = megasched.create_schedule(tiny_model("llama"))
    sch["model.layers.*.mlp"].trace()
    parts = sch["model.layers.*.mlp"].find(patterns.swiglu)
    assert [part.path for part in parts] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert parts[0].inputs == ("gate_proj", "up_proj")


# refusals --------------------------------------------------------------------------------------------


def test_find_refuses():
    sch = megasched.create_schedule(nn.Sequential(Mlp()))
    assert 'sch["0"].trace()' in refusal(sch["0"].find, ".*")
    sch = schedule()
    assert "did you mean act.gelu" in refusal(sch["0"].find, "act.gel")
    assert sch["0"].find("act.gel", missing_ok=True) == []
    assert "no regular expression" in refusal(sch["0"].find, "(")
    assert "nothing matches swiglu" in refusal(sch["0"].find, patterns.swiglu)


def test_what_is_no_graph_in_a_run_is_refused_by_the_plan():
    def refused(layout, *paths):
        model = tiny_model("llama")
        sch = megasched.create_schedule(model, layout)
        for path in paths:
            sch[path].trace()
        sch["model.layers.0.mlp.up_proj"].shard("weight", axis=0)
        return refusal(make_plan, sch, model=model, causal_lm=True)

    stages = ParallelDims(pipeline_model_parallel_size=2)
    assert "holds layers of several pipeline stages (2)" in refused(stages, "model")
    cut = ParallelDims(tensor_model_parallel_size=2, sequence_parallel=True)
    for layout, how in ((cut, "sequence"), (ParallelDims(context_parallel_size=2), "context")):
        assert f"holds layers, around which {how} parallelism adds what has no graph" in refused(layout, "model")
    for layout in (ParallelDims(), stages):
        told = refused(layout, "model.layers.0.mlp.up_proj", "model.layers.1.mlp", "model.norm", "lm_head")
        assert told.count("  - ") == 1
        assert "is traced, and sharded at" in told
        assert "module: model.layers.0.mlp.up_proj" in told


def test_experts_that_are_shared_out_are_no_graph():
    for layout in (ParallelDims(), ParallelDims(expert_model_parallel_size=2)):
        model = tiny_model("mixtral")
        sch = megasched.create_schedule(model, layout)
        for layer in sch["model.layers"]:
            for name in ("gate_up_proj", "down_proj"):
                layer["mlp.experts"].shard(name, axis=0)
        sch["model.layers.0.mlp.experts"].trace()
        if layout.ep == 1:
            make_plan(sch, model=model, causal_lm=True)
        else:
            assert "is traced, and sharded at" in refusal(make_plan, sch, model=model, causal_lm=True)


def test_subgraphs_that_can_not_be_one_part():
    sch = schedule()
    act, drop = sch["0"].find("act.gelu")[0], sch["0"].find("drop.*")[0]
    up, down = sch["0"].find("up")[0], sch["0"].find("down")[0]
    assert "lies between" in refusal(sch["0"].checkpoint, up | down)
    assert "live calls" in refusal(sch["0"].fuse, act | drop | down)
    assert "not of this module" in refusal(sch.fuse, act)
    assert "not a list" in refusal(sch["0"].fuse, [act, drop])
    assert "no operation act.tanh" in refusal(sch["0"].fuse, Subgraph("0", ("act.tanh",)))
    assert "two modules" in refusal(lambda: act | Subgraph("1", ("act.gelu",)))
    sch["0"].fuse(act).checkpoint(act | drop)
    assert "belongs to the sub-graph of fuse" in refusal(megasched.build, sch)


def test_compilers_refuse(monkeypatch):
    sch = schedule()
    act = sch["0"].find(patterns.gelu)[0]
    with pytest.raises(megasched.ConfigError, match="inductor, megatron"):
        sch["0"].fuse(act, compiler="tvm")
    assert "Transformer Engine is not installed" in refusal(sch["0"].fuse, act, compiler="te")
    assert "megatron has fused functions for" in refusal(sch["0"].fuse, act, compiler="megatron")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert "needs a C++ compiler" in refusal(sch["0"].fuse, act)


def test_a_registered_compiler_gets_the_part():
    @megasched.register_compiler("counting")
    def counting(part):
        part.kept["runs"] = 0

        def run(*tensors):
            part.kept["runs"] += 1
            return part.graph(*tensors)

        counting.part = part
        return run

    sch = schedule()
    sch["0"].fuse(sch["0"].find(patterns.gelu)[0], compiler="counting")
    megasched.build(sch)(X)
    assert counting.part.kept == {"runs": 1}
    assert counting.part.subgraph.inputs == ("up",)


def test_replacements_that_would_lose_something():
    for factory, said in (
        (lambda old: nn.Linear(16, 16), "has parameters"),
        (lambda old: 3, "can't be called"),
        (lambda old: lambda x: x[..., :1], "returns shapes"),
    ):
        sch = schedule()
        sch["0"].replace(factory, subgraph=sch["0"].find("act.gelu")[0])
        assert said in refusal(megasched.build(sch), X)


class Branching(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x
        return -x


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Custom(nn.Module):
    def forward(self, x):
        return Doubled.apply(x)


@pytest.mark.parametrize(
    ("inner", "reason"), [(Branching(), "depends on the values"), (Custom(), "would be lost")]
)
def test_what_can_not_be_traced_is_told_with_its_line(inner, reason):
    sch = megasched.create_schedule(nn.Sequential(nn.Sequential(nn.Linear(8, 8), inner)))
    said = refusal(sch["0"].trace, inputs={"input": X})
    assert reason in said
    assert "module: 0.1" in said
    assert "test_primitives.py:" in said.split("asked for")[0]
    assert 'leaves=["1"]' in said
    assert sch.records == []
    sch["0"].trace(inputs={"input": X}, leaves=["1"])
    want = backward(copy.deepcopy(sch.mod))
    assert alike(backward(megasched.build(sch)), want)


def test_traces_that_stand_in_each_other_and_decompose_in_none():
    sch = megasched.create_schedule(tiny_model("llama"))
    sch["model.layers.0.mlp"].trace()
    sch["model.layers.0"].trace()
    assert "is traced, and so is model.layers.0.mlp" in refusal(megasched.build, sch)
    sch = megasched.create_schedule(tiny_model("llama"))
    sch["model.layers.0.mlp.up_proj"].decompose()
    assert "no traced module shows this linear" in refusal(megasched.build, sch)
    assert "decompose takes a Linear" in refusal(sch["model.norm"].decompose)
    sch["model.layers.0"].trace()
    assert "call decompose before trace" in refusal(sch["model.layers.0.mlp.down_proj"].decompose)


def test_a_cache_is_refused():
    model, ids = tiny_model("llama"), token_ids()
    sch = megasched.create_schedule(model)
    sch["model.layers.0"].trace()
    built = megasched.build(sch)
    assert "use_cache=False" in refusal(built, input_ids=ids, use_cache=True)


def test_a_node_that_training_does_not_have_is_told():
    sch = schedule()
    sch["0"].checkpoint(sch["0"].find("drop.*")[0])
    built = megasched.build(sch)
    built[0].drop = nn.Identity()
    assert "the graph has no operation drop.dropout" in refusal(built, X)
    assert traced.FEW == 8


def test_names_found_in_float32_hold_in_bfloat16():
    model, ids = tiny_model("llama"), token_ids()
    runs = []
    for recomputed in (False, True):
        sch = megasched.create_schedule(copy.deepcopy(model))
        layer = sch["model.layers.0"]
        layer.trace()
        for part in layer.find(patterns.rms_norm) if recomputed else ():
            layer.checkpoint(part)
        built = megasched.build(sch).to(torch.bfloat16)
        built(input_ids=ids, labels=ids).loss.backward()
        runs.append([p.grad for p in built.parameters()])
    assert alike(*runs)


def test_a_graph_can_not_hold_several_stages():
    layout = megasched.ParallelDims(pipeline_model_parallel_size=2)
    sch = megasched.create_schedule(tiny_model("llama"), layout)
    sch["model"].trace_until("layers.*")
    record = sch.records[0]
    primitive = megasched.language.registry.get_primitive("trace_until")
    (problem,) = primitive.check(sch["model"], record.arguments, record.source)
    assert "several pipeline stages" in str(problem)


@pytest.mark.parametrize("primitive", ["checkpoint", "fork_rng"])
def test_modules_that_are_wrapped_inside_a_traced_one_stay_calls(primitive):
    model, ids = tiny_model("llama"), token_ids()
    runs = []
    for wrapped in (False, True):
        sch = megasched.create_schedule(copy.deepcopy(model))
        sch["model.layers.0"].trace()
        if wrapped:
            getattr(sch["model.layers.0.mlp"], primitive)()
        built = megasched.build(sch)
        built(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        runs.append([p.grad for p in built.parameters()])
    assert alike(*runs)
