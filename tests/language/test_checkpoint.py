"""Checkpoint: the recomputed run is the plain one bit for bit, and nothing else changes."""

import copy

import pytest
import torch
import transformers
from torch import nn

import megasched
from megasched import ParallelDims
from megasched.layers.rng import forked
from megasched.verify.ranks.pool import init_megatron
from tests.lowering.models import Mlp, randomize, tiny_model, token_ids


class Counted(nn.Module):
    """Counts its forwards; takes arguments by position, by name, and ones that are no tensors."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, *, scale=1.0, mask=None, flag="no"):
        y = torch.tanh(self.linear(x)) * scale
        return {"y": y if mask is None else y * mask, "flag": flag}


class Caller(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Counted()

    def forward(self, x):
        return self.inner(x, scale=torch.full((8,), 2.0), mask=x > 0, flag="yes")


def build(model, fill, **arguments):
    sch = megasched.create_schedule(model)
    fill(sch)
    return megasched.build(sch, **arguments)


def backward(model, *args, **kwargs):
    """Output and gradients by name."""
    model.zero_grad(set_to_none=True)
    output = model(*args, **kwargs)
    tensor = output["y"] if isinstance(output, dict) and "y" in output else getattr(output, "loss", output)
    tensor.square().sum().backward()
    return tensor.detach(), {name: p.grad for name, p in model.named_parameters()}


def equal(one, two):
    """Bit for bit, and as many gradients."""
    return (
        torch.equal(one[0], two[0])
        and one[1].keys() == two[1].keys()
        and all((g is None) == (two[1][n] is None) for n, g in one[1].items())
        and all(torch.equal(g, two[1][n]) for n, g in one[1].items() if g is not None)
    )


def runs_of(module):
    """A list that gets an item at each call; one that the module's code kept would be put back by recompute."""
    runs = []
    module.register_forward_hook(lambda *call: runs.append(forked()))
    return runs


X = torch.linspace(-1, 1, 32).reshape(4, 8)


def test_arguments_arrive_by_name_and_the_structure_comes_back():
    model = randomize(Caller())
    want = backward(model, X)
    assert model(X)["flag"] == "yes"
    scheduled = build(copy.deepcopy(model), lambda sch: sch["inner"].checkpoint())
    runs = runs_of(scheduled.inner.linear)
    assert equal(backward(scheduled, X), want)
    assert len(runs) == 2  # the second time in the backward pass
    assert scheduled(X)["flag"] == "yes"


def test_paths_keys_and_classes_stay():
    model = randomize(Caller())
    before = {path: type(m) for path, m in model.named_modules()}
    keys = list(model.state_dict())
    build(model, lambda sch: sch["inner"].checkpoint())
    assert {path: type(m) for path, m in model.named_modules()} == before
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("how", ["eval", "no_grad"])
def test_nothing_is_recomputed_where_nothing_is_kept(how):
    model = build(randomize(Caller()), lambda sch: sch["inner"].checkpoint())
    runs = runs_of(model.inner.linear)
    if how == "eval":
        backward(model.eval(), X)
    else:
        with torch.no_grad():
            model(X)
    assert len(runs) == 1


def test_asked_twice_is_once():
    model = build(randomize(Caller()), lambda sch: sch["inner"].checkpoint().checkpoint())
    runs = runs_of(model.inner.linear)
    backward(model, X)
    assert len(runs) == 2


def test_a_block_fed_with_ids_alone_gets_its_gradients():
    model = randomize(nn.Sequential(nn.Sequential(nn.Embedding(9, 8), Mlp())))
    ids = torch.arange(9)
    want = backward(model, ids)
    scheduled = build(copy.deepcopy(model), lambda sch: sch["0"].checkpoint())
    got = backward(scheduled, ids)
    assert equal(got, want)
    assert all(g is not None for g in got[1].values())


def test_dropout_draws_the_same_numbers_again():
    model = randomize(nn.Sequential(Mlp(dropout=0.5), Mlp(dropout=0.5)))
    scheduled = build(copy.deepcopy(model), lambda sch: sch["*"].checkpoint())
    torch.manual_seed(5)
    want = backward(model, X)
    torch.manual_seed(5)
    assert equal(backward(scheduled, X), want)


@pytest.mark.parametrize("families", [("llama", "gpt2")])
def test_hf_layers_with_their_cache_switched_off(families):
    for family in families:
        model = tiny_model(family)
        model.config.use_cache = True
        ids = token_ids()
        want = backward(model, input_ids=ids, labels=ids, use_cache=False)
        layers = "model.layers.*" if family == "llama" else "transformer.h.*"
        scheduled = build(copy.deepcopy(model), lambda sch, layers=layers: sch[layers].checkpoint())
        assert scheduled.config.use_cache is False
        assert model.config.use_cache is True
        assert equal(backward(scheduled, input_ids=ids, labels=ids), want)


def test_the_cache_stays_on_where_nothing_is_recomputed():
    model = tiny_model("llama")
    model.config.use_cache = True
    assert build(model, lambda sch: sch["model.layers.0"].fork_rng()).config.use_cache is True


class Noise(nn.Module):
    """Draws by itself."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return nn.functional.dropout(self.linear(x), 0.5)


def _seed():
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(3)
    model_parallel_cuda_manual_seed(3)


RECOMPUTED = {
    # what is recomputed in a model whose pair is sharded, with dropout in every place
    "the sharded block": lambda sch: sch["1"].checkpoint(),
    "everything": lambda sch: sch["*"].checkpoint(),
    "inside and outside": lambda sch: [sch["1"].checkpoint(), sch["1.act"].checkpoint(), sch["0"].checkpoint()],
    "forked, then recomputed": lambda sch: sch["2"].fork_rng().checkpoint(),
    "recomputed, then forked": lambda sch: sch["2"].checkpoint().fork_rng(),
    "recomputed inside a fork": lambda sch: [sch["2"].fork_rng(), sch["2.linear"].checkpoint()],
}


def _bit_for_bit():
    init_megatron(tp=2)
    found = {}

    def shards(sch):
        sch["1.up"].shard("weight", axis=0)
        sch["1.down"].shard("weight", axis=1)
        sch["2"].fork_rng()

    model = randomize(nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), Mlp(dropout=0.5), Noise()))
    plain = build(copy.deepcopy(model), shards, inputs={"input": X})
    for name, more in RECOMPUTED.items():
        scheduled = build(
            copy.deepcopy(model), lambda sch, more=more: [shards(sch), more(sch)], inputs={"input": X}
        )
        runs, states = [], runs_of(scheduled[2].linear)
        for each in (plain, scheduled):
            _seed()
            # twice, so that what the first backward left of the states shows
            runs.append([backward(each, X), backward(each, X)])
        found[name] = equal(runs[0][0], runs[1][0]) and equal(runs[0][1], runs[1][1]) and all(states)
    return found


def test_with_dropout_everywhere_at_tp2(ranks):
    for found in ranks.run(2, _bit_for_bit):
        assert found == dict.fromkeys(RECOMPUTED, True)


def _hf_with_dropout():
    """Attention dropout differs between the ranks, residual dropout does not; recomputed layer by layer."""
    from megasched.model_adapters.default_schedule import schedule as auto

    init_megatron(tp=2)
    ids = token_ids()
    found = {}
    for family, changes, layers in (
        ("gpt2", {"attn_pdrop": 0.2, "resid_pdrop": 0.2, "embd_pdrop": 0.2}, "transformer.h.*"),
        ("opt", {"attention_dropout": 0.2, "dropout": 0.2}, "model.decoder.layers.*"),
    ):
        model = tiny_model(family, **changes)
        runs = []
        for more in (lambda sch: None, lambda sch, layers=layers: sch[layers].checkpoint()):
            scheduled = build(copy.deepcopy(model), lambda sch, more=more: [auto(sch, sch.layout), more(sch)])
            _seed()
            runs.append(backward(scheduled, input_ids=ids, labels=ids, use_cache=False))
        found[family] = equal(*runs)
    return found


def test_hf_layers_with_dropout_at_tp2(ranks):
    assert ranks.run(2, _hf_with_dropout) == [{"gpt2": True, "opt": True}] * 2


def test_a_schedule_of_no_layout_is_of_one_rank():
    assert megasched.create_schedule(Caller()).layout == ParallelDims()


class Ordered(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, scale, mask=None, power=2):
        y = torch.tanh(self.linear(x)) * scale
        return (y if mask is None else y * mask) ** power


class Ordering(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Ordered()

    def forward(self, x):
        return self.inner(x, mask=(x > 0).float(), scale=torch.linspace(1, 2, 8), power=3)


def in_order(*args, **kwargs):
    return (*args, kwargs["scale"], kwargs["mask"], kwargs["power"])


def test_an_order_of_arguments_that_keeps_them_changes_nothing():
    model, x = randomize(Ordering()), torch.linspace(-1, 1, 48).reshape(2, 3, 8)
    want = backward(copy.deepcopy(model), x)
    built = build(model, lambda sch: sch["inner"].checkpoint(order_args_fn=in_order))
    runs = runs_of(built.inner.linear)
    assert equal(backward(built, x), want)
    assert len(runs) == 2


@pytest.mark.parametrize(
    ("order", "lost"),
    [
        (lambda x, **kwargs: (x, kwargs["scale"]), "mask, power"),
        (lambda x, **kwargs: (x, kwargs["mask"], kwargs["scale"], 3), "scale, mask"),
        (lambda x, **kwargs: (x, kwargs["scale"], kwargs["mask"], True), "power"),
        (
            lambda x, **kwargs: (x, kwargs["scale"], kwargs["mask"], 3, 4),
            "arguments (too many positional arguments)",
        ),
    ],
)
def test_an_order_that_loses_an_argument_is_refused_with_the_line(order, lost):
    fill = lambda sch: sch["inner"].checkpoint(order_args_fn=order)  # noqa: E731
    model = build(randomize(Ordering()), fill)
    with pytest.raises(megasched.ScheduleError) as raised:
        model(torch.ones(1, 2, 8))
    (problem,) = raised.value.problems
    assert problem.what == f"checkpoint: order_args_fn loses or changes {lost}, which the parent gives"
    assert (problem.module, problem.source) == ("inner", f"{__file__}:{fill.__code__.co_firstlineno}")


class Switched(nn.Module):
    """Has the name of an option of torch's checkpoint."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, debug=False, preserve_rng_state=True, function=None):
        return torch.tanh(self.linear(x)) * (3 if debug and not preserve_rng_state and function else 1)


class Switching(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Switched()

    def forward(self, x):
        return self.inner(x, debug=True, preserve_rng_state=False, function=2)


def test_names_of_torchs_options_are_the_modules():
    model = randomize(Switching())
    want = backward(copy.deepcopy(model), X)
    assert equal(backward(build(model, lambda sch: sch["inner"].checkpoint()), X), want)


def test_several_backwards_through_one_forward():
    model = randomize(nn.Sequential(Mlp(dropout=0.5), nn.Sequential(nn.BatchNorm1d(8), Mlp())))
    scheduled = build(copy.deepcopy(model), lambda sch: sch["*"].checkpoint())
    runs = []
    for each in (model, scheduled):
        torch.manual_seed(5)
        y = each(X)
        y.sum().backward(retain_graph=True)
        y.square().sum().backward(retain_graph=True)
        (more,) = torch.autograd.grad(y.sum(), [each[0].up.weight])
        runs.append(
            (y, {**{n: p.grad for n, p in each.named_parameters()}, "more": more, **dict(each.named_buffers())})
        )
    assert equal(*runs)


def _compared_with_caches(model, path, **calls):
    """A copy with a recomputed layer, of which the gradients are those of the model, whose stacks keep caches."""
    scheduled = copy.deepcopy(model)
    sch = megasched.create_schedule(scheduled)
    sch[path].checkpoint()
    megasched.build(sch, inputs=calls)
    found = []
    for each in (model, scheduled):
        output = each(**calls)
        getattr(output, "logits", output).square().mean().backward()
        found.append({name: p.grad for name, p in each.named_parameters() if p.grad is not None})
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
    return scheduled


class Reward(nn.Module):
    def __init__(self):
        super().__init__()
        self.model, self.head = tiny_model("llama"), nn.Linear(32, 1)

    def forward(self, input_ids):
        return self.head(self.model.model(input_ids).last_hidden_state)


def t5():
    sizes = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, dropout_rate=0.0))


def llava():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(vocab_size=99, **sizes),
        vision_config=transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4),
        image_token_index=98,
    )
    return transformers.LlavaForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("make", "path", "decoded"),
    [
        (t5, "decoder.block.0", True),
        (llava, "model.language_model.layers.0", False),
        (Reward, "model.model.layers.0", False),
    ],
)
def test_caches_of_every_config_in_the_model(tmp_path, make, path, decoded):
    model, ids = randomize(make()).train(), token_ids(vocabulary=90)
    calls = {"input_ids": ids, **({"decoder_input_ids": ids} if decoded else {})}
    scheduled = _compared_with_caches(model, path, **calls)
    if make is not Reward:
        megasched.save_pretrained(scheduled, tmp_path / "built")
        model.save_pretrained(tmp_path / "plain")
        saved = [(tmp_path / folder / "config.json").read_text() for folder in ("built", "plain")]
        assert saved[0] == saved[1]
