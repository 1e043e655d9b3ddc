"""Random numbers: the same on all TP ranks where activations are, others where they are sharded."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import megasched
from megasched import ParallelDims, ScheduleError
from megasched.layers.rng import fork_rng, forked
from megasched.plan.make import make_plan
from megasched.verify.ranks.pool import init_megatron
from tests.lowering.models import Mlp, randomize, tiny_model, token_ids

X = {"x": torch.ones(2, 3, 8)}


class Functional(nn.Module):
    """Drops between its linears without a module."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(F.dropout(self.up(x), 0.5, self.training))


class Around(nn.Module):
    """Dropout before, between and after a sharded pair; keeps what each made."""

    def __init__(self, pair):
        super().__init__()
        self.before, self.pair, self.after = nn.Dropout(0.5), pair, nn.Dropout(0.5)

    def forward(self, x):
        return self.after(self.pair(self.before(x)))


def pair(sch, path="pair"):
    sch[path]["up"].shard("weight", axis=0)
    sch[path]["down"].shard("weight", axis=1)


def planned(model, fill):
    sch = megasched.create_schedule(model, ParallelDims(tensor_model_parallel_size=2))
    fill(sch)
    return make_plan(sch, inputs=X)


def test_what_stands_between_is_found():
    assert planned(Around(Mlp(dropout=0.5)), pair).tp_facts.forked == {"pair.drop"}
    assert planned(Around(Mlp(dropout=0.0)), pair).tp_facts.forked == set()


def test_functional_dropout_on_sharded_activations_is_refused_with_the_remedy():
    with pytest.raises(ScheduleError) as raised:
        planned(Around(Functional()), pair)
    (problem,) = raised.value.problems
    assert problem.what == "draws random numbers for activations that are sharded over TP, outside of nn.Dropout"
    assert problem.module == "pair"
    assert problem.source == f"{__file__}:{pair.__code__.co_firstlineno + 1}"
    assert problem.remedy.startswith('call sch["pair"].fork_rng()')


@pytest.mark.parametrize("path", ["pair", ""])
def test_the_remedy_works_on_the_module_and_around_it(path):
    plan = planned(Around(Functional()), lambda sch: [pair(sch), sch[path].fork_rng()])
    assert plan.tp_facts.problems == []


def test_functional_dropout_on_whole_activations_is_fine():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.pair = Mlp()

        def forward(self, x):
            return F.dropout(self.pair(F.dropout(x, 0.5)), 0.5)

    assert planned(Whole(), pair).tp_facts.problems == []


def _drawn():
    """Which elements each dropout let through, on this rank."""
    init_megatron(tp=2)
    found = {}
    for name, make, more in (
        ("module", Mlp, lambda sch: None),
        ("functional", Functional, lambda sch: sch["pair"].fork_rng()),
    ):
        model = Around(make(dropout=0.5) if make is Mlp else make())
        nn.init.ones_(model.pair.down.weight)
        randomize(model.pair.up)
        sch = megasched.create_schedule(model)
        pair(sch)
        more(sch)
        megasched.build(sch, inputs=X)
        kept = {}

        def keep(module, args, output, kept=kept):
            kept[id(module)] = output != 0

        for module in (model.before, model.after):
            module.register_forward_hook(keep)
        model.pair.down.register_forward_pre_hook(
            lambda module, args, kept=kept: kept.update({id(module): args[0] != 0})
        )
        model(**X)
        found[name] = [kept[id(m)] for m in (model.before, model.pair.down, model.after)]
    return found


def test_the_ranks_draw_alike_outside_and_apart_inside(ranks):
    one, two = ranks.run(2, _drawn)
    for name in one:
        before, between, after = zip(one[name], two[name], strict=True)
        assert torch.equal(*before), name
        assert torch.equal(*after), name
        assert not torch.equal(*between), name
        assert all(0 < piece.float().mean() < 1 for piece in (*before, *between, *after)), name


def _attention_dropout():
    """Attention outputs of a model whose heads and weights are all the same, so that only the draws differ."""
    from megasched.model_adapters.default_schedule import schedule as auto

    init_megatron(tp=2)
    found = {}
    for family, attention, changes in (
        ("llama", "model.layers.0.self_attn", {"attention_dropout": 0.5, "num_key_value_heads": 4}),
        ("gpt2", "transformer.h.0.attn", {"attn_pdrop": 0.5}),
        ("gemma2", "model.layers.0.self_attn", {"attention_dropout": 0.5, "num_key_value_heads": 4}),
    ):
        model = tiny_model(family, **changes)
        for parameter in model.get_submodule(attention).parameters():
            nn.init.constant_(parameter, 0.1)
        sch = megasched.create_schedule(model)
        auto(sch, sch.layout)
        megasched.build(sch)
        row = model.get_submodule(attention + (".c_proj" if family == "gpt2" else ".o_proj"))
        kept = []
        row.register_forward_pre_hook(lambda module, args, kept=kept: kept.append(args[0].detach().clone()))
        ids = token_ids()
        model(input_ids=ids)
        model.eval()(input_ids=ids)
        found[family] = kept
    return found


def test_attention_dropout_differs_between_ranks(ranks):
    one, two = ranks.run(2, _attention_dropout)
    for family in one:
        assert not torch.allclose(one[family][0], two[family][0]), family
        assert torch.equal(one[family][1], two[family][1]), family  # no dropout in eval: nothing else differs


def _states():
    """Nested forks stay in the outer one; the default state is untouched by what is drawn inside."""
    init_megatron(tp=2)
    torch.manual_seed(1)
    plain = [torch.rand(4), torch.rand(4)]
    torch.manual_seed(1)
    first = torch.rand(4)
    with fork_rng():
        one = torch.rand(4)
        with fork_rng():
            two = torch.rand(4)
            inside = forked()
    assert not forked()
    return (
        torch.equal(first, plain[0]) and torch.equal(torch.rand(4), plain[1]),
        inside,
        torch.equal(one, two),
        one,
    )


def test_nested_forks(ranks):
    (kept, inside, again, one), (*rest, two) = ranks.run(2, _states)
    assert (kept, inside, again) == (True, True, False)
    assert rest == [True, True, False]
    assert not torch.equal(one, two)


def test_without_megatrons_states_a_fork_draws_as_ever():
    torch.manual_seed(1)
    want = torch.rand(4)
    torch.manual_seed(1)
    with fork_rng():
        assert torch.equal(torch.rand(4), want)
