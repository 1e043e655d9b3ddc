"""``build`` as a whole: real weights stay, deferred ones stay deferred, what it refuses, what it leaves alone."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import megasched
from megasched import ConfigError, ParallelDims, ScheduleError
from megasched.definition import attention_interface
from megasched.definition.build import build_definition, init_empty_weights
from megasched.lowering.build import plan_of
from megasched.verify.ranks.pool import init_megatron
from megasched.weights.random_init import RandomInit
from tests.lowering.models import Mlp, auto, randomize, tiny_config, tiny_model, token_ids
from tests.lowering.parity import distance, scheduled_copy


def _real_weights():
    """Every piece is the one of the weight that was there, bit for bit; the random state is untouched."""
    init_megatron(tp=2)
    rank = torch.distributed.get_rank()
    found = {}
    for family in ("qwen3", "gpt2", "phi3"):
        model = tiny_model(family)
        model.eval()
        want = {name: p.detach().clone() for name, p in model.named_parameters()}
        whole = {id(p) for p in model.parameters()}
        state = torch.get_rng_state()
        built, plan, _ = scheduled_copy(model, auto)
        found[family] = {
            "state": torch.equal(torch.get_rng_state(), state),
            "values": [
                n
                for n, p in built.named_parameters()
                if not torch.equal(p, plan.placements[n].shard(want[n], rank, 2))
            ],
            "names": list(built.state_dict()) == list(model.state_dict()),
            "mode": {m.training for m in built.modules()},
            "sizes": [
                path
                for path, cut in plan.cuts.items()
                for size in (("in_features", "out_features") if cut != "vocab" else ("embedding_dim",))
                if getattr(built.get_submodule(path), size, None) != getattr(model.get_submodule(path), size, None)
            ],
            "tied": (
                built.get_input_embeddings().weight is built.get_output_embeddings().weight,
                model.get_input_embeddings().weight is model.get_output_embeddings().weight,
            ),
        }
        mine = copy.deepcopy(model)
        held = dict(mine.named_parameters())
        sch = megasched.create_schedule(mine)
        auto(sch)
        megasched.build(sch)
        kept = dict(mine.named_parameters())
        found[family]["whole ones are the same objects"] = all(
            kept[name] is held[name] for name in kept if name.rpartition(".")[0] not in plan.cuts
        )
        assert whole == {id(p) for p in model.parameters()}
    return found


def test_real_weights_stay(ranks):
    for found in ranks.run(2, _real_weights):
        for family, facts in found.items():
            assert facts == {
                "state": True,
                "values": [],
                "names": True,
                "mode": {False},
                "sizes": [],  # which definitions read, to tell the loss how large the vocabulary is
                "tied": (family != "phi3",) * 2,
                "whole ones are the same objects": True,
            }, family


def _deferred():
    """A definition without weights: built, it has none either; filled first, it computes what it should."""
    init_megatron(tp=2)
    ids = token_ids()
    found = {}
    for family in ("llama", "gemma2", "gpt2"):
        definition = build_definition(tiny_config(family))
        filled = build_definition(tiny_config(family))
        sch = megasched.create_schedule(definition)
        auto(sch)
        sch["**.*norm*" if family != "gpt2" else "**.ln_1"][0].annotate("weight", "kind", "norm")
        megasched.build(sch)
        shapes = {name: tuple(p.shape) for name, p in definition.named_parameters()}
        megasched.materialize(filled, RandomInit(filled, 3))
        built, plan, _ = scheduled_copy(filled, auto)
        found[family] = {
            "real": [n for n, p in definition.named_parameters() if p.device.type != "meta"],
            "buffers on meta": [n for n, b in definition.named_buffers() if b.device.type == "meta"],
            "shapes": shapes == {n: p.local_shape(2) for n, p in plan.placements.items()},
            "attributes": {getattr(p, "partition_dim", None) for p in definition.parameters()} >= {0, 1},
            "annotated": sum(getattr(p, "kind", "") == "norm" for p in definition.parameters()),
            "filled": torch.allclose(built.eval()(ids).logits, filled.eval()(ids).logits, rtol=1e-4, atol=1e-6),
        }
    return found


def test_deferred_weights_stay_deferred_and_filled_ones_are_used(ranks):
    for found in ranks.run(2, _deferred):
        for family, facts in found.items():
            assert facts == {
                "real": [],
                "buffers on meta": [],
                "shapes": True,
                "attributes": True,
                "annotated": 1,
                "filled": True,
            }, family


def _deferred_heads():
    """Projections that stay whole because they have fewer heads than there are ranks."""
    init_megatron(tp=4)
    definition = build_definition(tiny_config("llama", attention_bias=True))
    sch = megasched.create_schedule(definition)
    auto(sch)
    megasched.build(sch)
    return {p.device.type for p in definition.parameters()}


def test_deferred_replicated_heads(ranks):
    assert ranks.run(4, _deferred_heads) == [{"meta"}] * 4


def test_a_plain_module_deferred():
    with init_empty_weights():
        model = Mlp()
    sch = megasched.create_schedule(model)
    sch["up"].shard("weight", axis=0)
    sch["down"].shard("weight", axis=1)
    assert {p.device.type for p in megasched.build(sch).parameters()} == {"meta"}


@pytest.mark.parametrize("copied", [copy.deepcopy, AveragedModel])
@pytest.mark.parametrize("of", ["", "model", "model.layers.0", "model.layers.0.input_layernorm"])
def test_copies_are_refused(copied, of):
    """A fused norm of a copy would read the weight of the first."""
    sch = megasched.create_schedule(tiny_model("llama"), name="auto")
    sch.level("fused")
    part = megasched.build(sch).get_submodule(of)
    with pytest.raises(ConfigError, match="a model that megasched built can't be copied"):
        copied(part)


def test_a_module_that_is_as_it_was_can_be_copied():
    sch = megasched.create_schedule(tiny_model("llama"), name="auto")
    sch.level("fused")
    head = megasched.build(sch).lm_head
    torch.testing.assert_close(copy.deepcopy(head).weight, head.weight, rtol=0, atol=0)


def test_only_the_whole_model_once():
    model = nn.Sequential(randomize(Mlp()))
    sch = megasched.create_schedule(model)
    with pytest.raises(ScheduleError, match="build takes the schedule of the whole model"):
        megasched.build(sch["0"])
    sch["0"].hook("fw_post", lambda module, args, output: 2 * output)
    x = torch.ones(1, 8)
    want = 2 * model(x)
    assert torch.equal(megasched.build(sch)(x), want)
    with pytest.raises(ScheduleError, match="the schedule is built already"):
        megasched.build(sch)
    assert torch.equal(model(x), want)


def _elsewhere():
    init_megatron(tp=2)
    words = []
    for layout in (
        ParallelDims(),
        ParallelDims(tensor_model_parallel_size=4),
        ParallelDims(tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
        ParallelDims(tensor_model_parallel_size=2, context_parallel_size=2),
    ):
        model = Mlp()
        sch = megasched.create_schedule(model, layout)
        sch["up"].shard("weight", axis=0)
        with pytest.raises(ScheduleError) as raised:
            megasched.build(sch, inputs={"x": torch.ones(1, 8)})
        words.append(raised.value.problems[0].what)
        assert type(model.up) is nn.Linear
    return words


def test_a_model_is_built_once():
    """A second build would take layers for a definition, and a second adapter would take the first one's place."""
    model, x = nn.Sequential(Mlp()), torch.ones(2, 8)
    first, second = megasched.create_schedule(model), megasched.create_schedule(model)
    for sch in (first, second):
        sch["0.up"].adapt(rank=2)
    megasched.build(first)
    nn.init.ones_(model[0].up.lora_B.weight)
    output = model(x)
    for again in (
        lambda: megasched.build(second),
        lambda: megasched.create_schedule(model),
        lambda: megasched.create_schedule(nn.Sequential(model)),
        lambda: megasched.create_schedule(model[0]),
        lambda: megasched.apply_schedule(model, "auto"),
    ):
        with pytest.raises(ScheduleError, match="the model is built already"):
            again()
    assert torch.equal(model(x), output)


def test_a_lowering_that_fails_is_named_and_its_model_not_built_again():
    @megasched.register_primitive
    class Failing(megasched.Primitive):
        name = "failing"

        def record(self, node):
            return {}

    @megasched.register_lowering("failing")
    def failing(module, record, context):
        raise RuntimeError("no GPU")

    model = nn.Sequential(Mlp())
    sch = megasched.create_schedule(model)
    sch["0"].failing()
    with pytest.raises(ScheduleError, match=r"failing: its lowering raised RuntimeError: no GPU(.|\n)*half built"):
        megasched.build(sch)
    with pytest.raises(ScheduleError, match="its build has failed half way"):
        megasched.build(sch)


def test_a_layout_that_is_not_this_processs(ranks):
    for words in ranks.run(2, _elsewhere):
        assert words == [
            "the schedule is for TP 1, and this process stands in a TP group of 2",
            "the schedule is for TP 4, and this process stands in a TP group of 2",
            "build makes whole models, and the layout has 2 pipeline stages",
            "the schedule is for CP 2, and this process stands in a CP group of 1",
        ]


def _shared_out_experts():
    """Deferred weights of experts; groups that are not the layout's; a model without experts."""
    init_megatron(ep=2)
    rank, whole = torch.distributed.get_rank(), build_definition(tiny_config("mixtral"))
    built = megasched.build(megasched.create_schedule(build_definition(tiny_config("mixtral")), name="auto"))
    megasched.materialize(built, RandomInit(whole, 3))
    megasched.materialize(whole, RandomInit(whole, 3))
    placements, wanted = plan_of(built).placements, dict(whole.named_parameters())
    held = {name: p for name, p in built.named_parameters() if placements[name].group == "ep"}
    same = all(torch.equal(p, placements[name].shard(wanted[name], rank, 2)) for name, p in held.items())
    words = []
    for model, ep in ((tiny_model("mixtral"), 4), (tiny_model("llama"), 2)):
        with pytest.raises(ScheduleError) as raised:
            megasched.build(megasched.create_schedule(model, ParallelDims(expert_model_parallel_size=ep)))
        words.append(raised.value.problems[0].what)
    return len(held), same, words


def test_experts_of_this_processs_groups(ranks):
    for count, same, (groups, dense) in ranks.run(2, _shared_out_experts):
        assert (count, same) == (4, True)
        assert "shares whole experts out over EP 4, and Megatron's groups here have EP 2" in groups
        assert "EP 2, and no experts are shared out" in dense


class OwnAttention(nn.Module):
    """Has an HF config, and an attention that asks nobody."""

    def __init__(self):
        super().__init__()
        self.config = tiny_config("llama")
        self.config._attn_implementation = "eager"
        self.mlp = Mlp()

    def forward(self, x):
        return self.mlp(x)


def test_attention_is_exchanged_only_where_it_is_called():
    own = OwnAttention()
    sch = megasched.create_schedule(own)
    sch["mlp.up"].shard("weight", axis=0)
    megasched.build(sch, inputs={"x": torch.ones(1, 8)})
    assert own.config._attn_implementation == "eager"
    model = tiny_model("llama")
    sch = megasched.create_schedule(model)
    auto(sch)
    megasched.build(sch)
    assert model.config._attn_implementation == attention_interface.NAME
    untouched = tiny_model("llama")  # nothing is cut
    sch = megasched.create_schedule(untouched)
    sch["model.layers.0"].checkpoint()
    megasched.build(sch)
    assert untouched.config._attn_implementation == attention_interface.NAME  # as in a training run


def _library_door():
    """Apply_schedule by name and by file; the model keeps its own interface, and its weights can be saved."""
    init_megatron(tp=2)
    model = tiny_model("qwen2")
    want = model(token_ids()).logits
    built = megasched.apply_schedule(copy.deepcopy(model), "auto")
    output = built(input_ids=token_ids(), output_hidden_states=True)
    return (
        built is not model,
        torch.allclose(output.logits, want, rtol=1e-4, atol=1e-5),
        len(output.hidden_states),
        type(built).__name__,
    )


def test_apply_schedule(ranks):
    assert ranks.run(2, _library_door) == [(True, True, 3, "Qwen2ForCausalLM")] * 2


def _penalty(model, x):
    """The gradient of the square of a gradient."""
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), x)[0]


def _second_derivatives():
    model, x = Mlp(), torch.randn(2, 3, 8, requires_grad=True)
    wanted, distributed = _penalty(model, x), torch.distributed.is_initialized()
    if distributed:
        init_megatron(tp=2)
    sch = megasched.create_schedule(model)
    sch["up"].shard("weight", axis=0)
    sch["down"].shard("weight", axis=1)
    built = megasched.build(sch, inputs={"x": x})
    if distributed:
        with pytest.raises(ConfigError, match="create_graph=True: gradients of gradients would be wrong"):
            _penalty(built, x)
        built(x).sum().backward()
    else:
        assert distance(_penalty(built, x), wanted) < 1e-5


def test_gradients_of_gradients_are_refused_where_ranks_sum_them(ranks):
    _second_derivatives()
    ranks.run(2, _second_derivatives)
