"""What a built model is to its user: its own state dict, a process without groups, its parameters replaced."""

import copy

import pytest
import torch
from torch import nn

import megasched
from megasched import HFFolder, RandomInit
from megasched.definition.build import build_definition
from megasched.lowering.build import plan_of
from megasched.verify.ranks.pool import init_megatron
from tests.lowering.models import Mlp, auto, tiny_config, tiny_model, token_ids
from tests.lowering.parity import compare_gradients, distance, scheduled_copy, too_far

FAMILIES = ("llama", "qwen3", "gpt2", "phi3", "mixtral")


@pytest.mark.parametrize("family", FAMILIES)
def test_auto_in_a_process_without_groups_changes_no_number(family):
    model, ids = tiny_model(family), token_ids()
    wanted = model(input_ids=ids, labels=ids)
    wanted.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    built = megasched.apply_schedule(copy.deepcopy(model), "auto")
    found = built(input_ids=ids, labels=ids)
    built.zero_grad()
    found.loss.backward()
    torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-5, atol=1e-6)
    for name, parameter in built.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6, msg=name)


def _reloaded(tp, level):
    """Family -> what a strict load of a built model's own state dict left different."""
    init_megatron(tp=tp)
    found = {}
    for family in FAMILIES:
        sch = megasched.create_schedule(tiny_model(family))
        auto(sch)
        sch.level(level)
        built = megasched.build(sch)
        state = {name: value.clone() for name, value in built.state_dict().items()}
        with torch.no_grad():
            for parameter in built.parameters():
                parameter.zero_()
        built.load_state_dict(state)
        now = built.state_dict()
        found[family] = [name for name, value in state.items() if not torch.equal(now[name], value)]
    return found


@pytest.mark.parametrize("level", ["leaf", "fused"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_built_model_loads_its_own_state_dict_strictly(ranks, tp, level):
    assert ranks.run(tp, _reloaded, tp, level) == [{family: [] for family in FAMILIES}] * tp


def _with_new_parameters(family):
    """Distances from the unscheduled model where every parameter is another object than the one that was built."""
    init_megatron(tp=2)
    model = tiny_model(family)
    built, plan, _ = scheduled_copy(model, auto)
    rank = torch.distributed.get_rank()
    deferred = build_definition(tiny_config(family))
    sch = megasched.create_schedule(deferred)
    auto(sch)
    megasched.build(sch)
    pieces = {name: plan.placements[name].shard(p.detach(), rank, 2) for name, p in model.named_parameters()}
    ids, found = token_ids(), {}
    wanted = model(input_ids=ids, labels=ids).loss
    wanted.backward()
    for label, each in (("real", built), ("deferred", deferred)):
        _replace_parameters(each, pieces)
        loss = each.train()(input_ids=ids, labels=ids).loss
        loss.backward()
        found[label] = {"loss": distance(loss, wanted), **compare_gradients(each, plan, model)}
    return {label: too_far(gaps) for label, gaps in found.items()}


def _replace_parameters(model, values):
    """As trainers do that shard parameters, or fill them."""
    made = {}
    for name, old in list(model.named_parameters(remove_duplicate=False)):
        owner, _, local = name.rpartition(".")
        new = made.setdefault(id(old), nn.Parameter(values[name].clone().contiguous()) if name in values else None)
        setattr(model.get_submodule(owner), local, new)


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2"])
def test_partial_gradients_are_summed_whoever_holds_the_parameters(ranks, family):
    """Qwen3's norms of queries and keys have a partial gradient on each rank: 5e-3 off where it isn't summed."""
    assert ranks.run(2, _with_new_parameters, family) == [{"real": {}, "deferred": {}}] * 2


def _filled_after_the_build(family, folder):
    """Gradients and loss of a model whose shards are filled after it was built, from a folder and at random."""
    init_megatron(tp=2)
    ids, found = token_ids(), {}
    definition = build_definition(tiny_config(family))
    for label, source in (("folder", HFFolder(folder, definition)), ("random", RandomInit(definition, 3))):
        model = megasched.materialize(build_definition(tiny_config(family)), source).train()
        sch = megasched.create_schedule(build_definition(tiny_config(family)), name="auto")
        built = megasched.build(sch).train()
        assert megasched.materialize(built, source) is built
        wanted, got = (each(input_ids=ids, labels=ids).loss for each in (model, built))
        wanted.backward()
        got.backward()
        found[label] = {"loss": distance(got, wanted), **compare_gradients(built, plan_of(built), model)}
    return {label: too_far(gaps) for label, gaps in found.items()}


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_shards_are_filled_after_the_build(ranks, tmp_path, family):
    tiny_model(family).save_pretrained(tmp_path)
    assert ranks.run(2, _filled_after_the_build, family, str(tmp_path)) == [{"folder": {}, "random": {}}] * 2


def _initialise(module):
    """Of linears alone: layer norms keep what ``reset_parameters`` gives them."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.3)
        nn.init.constant_(module.bias, 0.5)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), Mlp()

    def forward(self, x):
        return self.mlp(self.norm(x))


def _initialised_by_a_function():
    """Shards of values that one process draws, too; no two parameters alike."""
    init_megatron(tp=2)
    torch.manual_seed(3)
    with megasched.init_empty_weights():
        whole, deferred = Normed(), Normed()
    megasched.materialize(whole, RandomInit(copy.deepcopy(whole), 3, _initialise))
    sch = megasched.create_schedule(deferred)
    sch["mlp.up"].shard(["weight", "bias"], axis=0)
    sch["mlp.down"].shard("weight", axis=1)
    x = torch.randn(2, 3, 8)
    built = megasched.build(sch, inputs={"x": x}, init_weights=_initialise)
    assert built.mlp.up.weight.shape == (8, 8)
    assert not torch.equal(whole.mlp.up.weight, whole.mlp.down.weight.T)
    assert float(whole.mlp.up.bias.sum()) == 8.0
    assert float(whole.norm.weight.sum()) == 8.0
    return distance(built(x), whole(x))


def test_a_function_initialises_deferred_weights_at_every_layout(ranks):
    assert all(off < 1e-6 for off in ranks.run(2, _initialised_by_a_function))


def test_slapos_init_weights_is_the_class_own():
    torch.manual_seed(3)
    definition = build_definition(tiny_config("qwen3"))
    sch = megasched.create_schedule(build_definition(tiny_config("qwen3")), name="auto")
    built = megasched.build(sch, init_weights=sch.mod._init_weights)
    wanted = megasched.materialize(definition, RandomInit(build_definition(tiny_config("qwen3")), 3))
    for name, value in wanted.named_parameters():
        assert torch.equal(built.get_parameter(name), value), name


def test_real_weights_are_not_initialised_again():
    with pytest.raises(megasched.ConfigError, match=r"norm\.weight is on cpu, not on meta"):
        megasched.build(megasched.create_schedule(Normed()), init_weights=_initialise)


def test_what_a_function_leaves_uninitialised_is_named():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x * self.scale

    with megasched.init_empty_weights():
        bare = Bare()
    with pytest.raises(megasched.ConfigError, match="scale: init_weights leaves it uninitialised"):
        megasched.build(megasched.create_schedule(bare), inputs={"x": torch.ones(3)}, init_weights=_initialise)


class Encoder(nn.Module):
    """Torch's own layer, which without gradients reads the weights of its linears, and calls none."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x)


def _encoder():
    """Why its linears stay whole, and whether it computes the same in training and without gradients."""
    init_megatron(tp=2)
    torch.manual_seed(0)
    model, x = Encoder(), torch.randn(2, 3, 8)
    sch = megasched.create_schedule(copy.deepcopy(model))
    sch["layer.linear1"].shard("weight", axis=0)
    sch["layer.linear2"].shard("weight", axis=1)
    built = megasched.build(sch, inputs={"x": x})
    near = [distance(built(x), model(x)) < 1e-5]
    with torch.no_grad():
        near.append(distance(built.eval()(x), model.eval()(x)) < 1e-5)
    return {path: why.reason for path, why in plan_of(built).left_whole.items()}, near


def test_what_torchs_own_code_reads_without_gradients_stays_whole(ranks):
    why = "its weight is read by code other than its own, of layer"
    assert ranks.run(2, _encoder) == [({"layer.linear1": why, "layer.linear2": why}, [True, True])] * 2


def _evaluated_before(mode):
    init_megatron(tp=2)
    model, ids = tiny_model("opt"), token_ids()
    built, plan, _ = scheduled_copy(model, auto, sequence_parallel=True)
    found = {}
    for step in range(2):
        with mode():
            losses = [each(input_ids=ids, labels=ids).loss for each in (built, model)]
        found[f"loss {step}"] = distance(*losses)
        for each in (built, model):
            each(input_ids=ids, labels=ids).loss.backward()
    return too_far(found | compare_gradients(built, plan, model))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_evaluated_first_trains(ranks, mode):
    """Megatron keeps the buffers that it gathers into, also those of an evaluation."""
    assert ranks.run(2, _evaluated_before, mode) == [{}] * 2


def _built_without_gradients(mode):
    init_megatron(tp=2)
    ids, model, built = token_ids(), tiny_model("llama"), tiny_model("llama")
    model(input_ids=ids, labels=ids).loss.backward()
    with mode():
        megasched.apply_schedule(built, "auto", sequence_parallel=True)
    built(input_ids=ids, labels=ids).loss.backward()
    return too_far(compare_gradients(built, plan_of(built), model))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_built_where_no_gradients_are_taken_trains(ranks, mode):
    assert ranks.run(2, _built_without_gradients, mode) == [{}] * 2


def _recomputed_after_another_batch(fill):
    init_megatron(tp=2)
    model = tiny_model("opt")  # its MLP takes the tokens of all sequences as one row
    built, plan, _ = scheduled_copy(model, fill, sequence_parallel=True)
    for each in (model, built):
        calls = [each(input_ids=ids, labels=ids).loss for ids in (token_ids(4, 8), token_ids(2, 16))]
        sum(calls).backward()
    return too_far(compare_gradients(built, plan, model), 1e-4)


def _recomputed(sch):
    auto(sch)
    sch["model.decoder.layers.*"].checkpoint()


def _recomputed_in_a_graph(sch):
    auto(sch)
    for layer in sch["model.decoder.layers"]:
        layer.trace()
        for each in layer.find("fc1|fc2"):
            layer.checkpoint(each)


@pytest.mark.parametrize("fill", [_recomputed, _recomputed_in_a_graph])
def test_a_batch_is_recomputed_after_another_was_called(ranks, fill):
    assert ranks.run(2, _recomputed_after_another_batch, fill) == [{}] * 2
