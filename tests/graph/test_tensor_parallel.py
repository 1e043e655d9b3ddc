"""Traced modules over sharded linears, at TP 2: the loss and every gathered gradient, against plain HF."""

import copy

import pytest
import torch

from megasched.errors import ScheduleError
from megasched.graph import patterns
from megasched.graph.capture import capture
from megasched.graph.intercept import Limits
from megasched.graph.traced import trace_module
from megasched.model_adapters.default_schedule import schedule as auto
from megasched.verify.ranks.pool import init_megatron
from tests.graph.running import graphs_run
from tests.graph.test_families import model_of
from tests.lowering.models import randomize, tiny_model, token_ids
from tests.lowering.parity import compare, distance, too_far

LLAMA = ("model.layers.0", "model.layers.1.self_attn", "model.layers.1.mlp", "model.layers.1.input_layernorm")
# Family -> a whole layer, then attention, MLP or experts (or what there is of one) and norm by themselves.
MODULES = {
    **dict.fromkeys(("llama", "qwen3", "gemma2", "phi3", "mixtral"), LLAMA),
    "gpt2": ("transformer.h.0", "transformer.h.1.attn", "transformer.h.1.mlp", "transformer.h.1.ln_1"),
    "opt": (
        "model.decoder.layers.0",
        "model.decoder.layers.1.self_attn",
        "model.decoder.layers.1.activation_fn",
        "model.decoder.layers.1.self_attn_layer_norm",
    ),
    "gpt_neox": (
        "gpt_neox.layers.0",
        "gpt_neox.layers.1.attention",
        "gpt_neox.layers.1.mlp",
        "gpt_neox.layers.1.input_layernorm",
    ),
    "bert": (
        "bert.encoder.layer.0",
        "bert.encoder.layer.1.attention",
        "bert.encoder.layer.1.intermediate",
        "bert.encoder.layer.1.output",
        "cls.predictions.transform.LayerNorm",
    ),
}


def _shard_bert(sch):
    for layer in sch["bert.encoder.layer.*"]:
        for name in ("attention.self.query", "attention.self.key", "attention.self.value", "intermediate.dense"):
            layer[name].shard("weight", axis=0)
        for name in ("attention.output.dense", "output.dense"):
            layer[name].shard("weight", axis=1)


def _shard_mixtral(sch):
    """Attention alone: the experts stay whole on every rank."""
    for attention in sch["model.layers.*.self_attn"]:
        for name in ("q_proj", "k_proj", "v_proj"):
            attention[name].shard("weight", axis=0)
        attention["o_proj"].shard("weight", axis=1)


# Families that no adapter knows.
SHARDS = {"bert": _shard_bert, "mixtral": _shard_mixtral}


def _families():
    """family -> distances, and how many graphs ran."""
    init_megatron(tp=2)
    ids, found = token_ids(), {}
    for family, paths in MODULES.items():
        call = {"input_ids": ids, "labels": ids, **({} if family == "bert" else {"use_cache": False})}

        def fill(sch, family=family, paths=paths):
            SHARDS.get(family, lambda sch: auto(sch, sch.layout))(sch)
            for path in paths:
                sch[path].trace()

        with graphs_run() as ran:
            found[family] = compare(model_of(family), fill, call), len(ran)
    return found


def test_sharded_blocks_of_every_family(ranks):
    for report in ranks.run(2, _families):
        assert {family: too_far(gaps) for family, (gaps, _) in report.items()} == {key: {} for key in MODULES}
        assert {family: ran for family, (_, ran) in report.items()} == {f: len(p) for f, p in MODULES.items()}
        assert all(len(gaps) > 10 for gaps, _ in report.values())


def _edits(tp):
    """SwiGLU by Megatron's fusion, the norm recomputed, bias and gelu decomposed out of column and row."""
    init_megatron(tp=tp)
    ids = token_ids()

    def llama(sch):
        auto(sch, sch.layout)
        layer = sch["model.layers.0"]
        layer.trace()
        layer.fuse(layer.find(patterns.swiglu)[0], compiler="megatron")
        layer.checkpoint(layer.find(patterns.rms_norm)[0])

    def gpt2(sch):
        auto(sch, sch.layout)
        mlp = sch["transformer.h.0.mlp"]
        for name in ("c_fc", "c_proj"):
            mlp[name].decompose()
        mlp.trace()
        mlp.fuse(mlp.find(patterns.bias_gelu)[0], compiler="megatron")

    call = {"input_ids": ids, "labels": ids, "use_cache": False}
    return {name: compare(tiny_model(name), fill, call) for name, fill in (("llama", llama), ("gpt2", gpt2))}


@pytest.mark.parametrize("tp", [1, 2])
def test_edits_compose_with_shards(ranks, tp):
    for report in ranks.run(tp, _edits, tp):
        assert {family: too_far(found) for family, found in report.items()} == {"llama": {}, "gpt2": {}}


def _recomputed():
    """Loss and gradients with a traced layer recomputed in part, in whole, and not, with dropout everywhere."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    import megasched

    init_megatron(tp=2)
    ids, runs = token_ids(), []
    model = tiny_model("gpt2", attn_pdrop=0.2, resid_pdrop=0.2)
    for form in ("plain", "part", "whole"):
        sch = megasched.create_schedule(copy.deepcopy(model))
        auto(sch, sch.layout)
        layer = sch["transformer.h.0"]
        layer.trace()
        if form == "part":
            layer.checkpoint(layer.find(r"mlp\.act\.add")[0] | layer.find(r"mlp\.act\.mul_2")[0])
            layer.checkpoint(layer.find(r"attn\.resid_dropout\.dropout")[0])
        if form == "whole":
            layer.checkpoint()
        built = megasched.build(sch)
        torch.manual_seed(3)
        model_parallel_cuda_manual_seed(3)
        loss = built(input_ids=ids, labels=ids).loss
        loss.backward()
        runs.append([loss.detach(), *(p.grad for p in built.parameters())])
    return [all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True)) for other in runs[1:]]


def test_recompute_of_a_traced_layer_is_bit_equal(ranks):
    assert ranks.run(2, _recomputed) == [[True, True]] * 2


def _synced():
    """Whether a ``sync`` doubles a gradient, and whether it does so in a traced layer."""
    import megasched

    init_megatron(tp=2)
    ids, runs = token_ids(), []
    for traced, synced in ((False, False), (False, True), (True, True)):
        sch = megasched.create_schedule(tiny_model("llama"))
        auto(sch, sch.layout)
        sch["model.layers.0.mlp.down_proj"].sync("fwd_post", "all_reduce")  # what is derived, said
        if synced:
            sch["model.layers.0.mlp.act_fn"].sync("bwd_post", lambda gradient: 2 * gradient)
        if traced:
            sch["model.layers.0"].trace()
        built = megasched.build(sch)
        built(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        runs.append({name: p.grad for name, p in built.named_parameters() if "layers.0.mlp.gate" in name})
    (plain,), (untraced,), (traced,) = (run.values() for run in runs)
    return bool((untraced == 2 * plain).all() and plain.any()), torch.equal(traced, untraced)


def test_a_sync_inside_keeps_its_backward(ranks):
    assert ranks.run(2, _synced) == [(True, True)] * 2


class ParallelMlp(torch.nn.Module):
    """Megatron's layers, cut over TP: [b, s, 8] -> [b, s, 8] through 16 features."""

    def __init__(self):
        from megatron.core.model_parallel_config import ModelParallelConfig
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

        super().__init__()
        config = ModelParallelConfig(tensor_model_parallel_size=2, perform_initialization=False)
        config.params_dtype, config.use_cpu_initialization = torch.float32, True
        options = {"config": config, "init_method": torch.nn.init.ones_, "bias": False, "skip_bias_add": False}
        self.up = ColumnParallelLinear(8, 16, gather_output=False, **options)
        self.down = RowParallelLinear(16, 8, input_is_parallel=True, **options)
        randomize(self, seed=torch.distributed.get_rank())

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x)[0]))[0]


def _gradients(run, module):
    x = torch.linspace(-1, 1, 48).reshape(2, 3, 8).requires_grad_()
    module.zero_grad()
    output = run(x)
    output.square().sum().backward()
    return [output.detach(), x.grad, *(p.grad for p in module.parameters())]


def _trap():
    """What a plain export of parallel layers gives, what is said of a trace through them, and what leaves give."""
    init_megatron(tp=2)
    module = ParallelMlp()
    want = _gradients(module, module)
    x = torch.linspace(-1, 1, 48).reshape(2, 3, 8).requires_grad_()
    exported = torch.export.export(module, (x,), strict=False).module()
    lost = _gradients(exported, exported)
    with pytest.raises(ScheduleError) as caught:
        capture(module, module.forward, (x,), {}, Limits(), path="mlp", source="here")
    trace_module(module, Limits(frozenset({"up", "down"})))
    with graphs_run() as ran:
        kept = _gradients(module, module)
    return {
        "right forward": torch.equal(lost[0], want[0]),
        "distance": distance(lost[1], want[1]),
        "said": str(caught.value),
        "kept": len(ran) == 1 and all(torch.equal(a, b) for a, b in zip(kept, want, strict=True)),
    }


def test_a_trace_through_megatrons_layers_would_lose_gradients_and_is_refused(ranks):
    """The trap: the forward of such a graph is right, and its gradients are not, without a word."""
    for found in ranks.run(2, _trap):
        assert found["right forward"]
        assert found["distance"] > 0.1
        assert "megatron.core.tensor_parallel" in found["said"]
        assert "a custom autograd function, would be lost in a graph" in found["said"]
        assert 'keep it a call: sch["mlp"].trace(leaves=["up"])' in found["said"]
        assert found["kept"]
