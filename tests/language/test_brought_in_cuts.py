"""What replacements bring in, and what they put inside of others, is cut like any; roles go where it stands."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from megasched import ParallelDims
from megasched.trainer.session import open_session
from megasched.verify.ranks.pool import init_megatron
from tests.language.replacing import Around
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
    assert plan.ends == plain.ends == ("model.embed_tokens.weight", "lm_head.weight")
    assert plan.roles.mlps.keys() == {moved(path) for path in plain.roles.mlps}
    assert plan.placements["model.layers.1.mlp.inner.up_proj.weight"].name == "model.layers.1.mlp.up_proj.weight"


def test_the_embedding_is_known_where_hf_does_not_find_it(tmp_path):
    """It looks for it in the base model. Megatron's optimizers treat embedding and head in ways of their own."""
    (tmp_path / "base.py").write_text(BASE)
    tiny_config("llama").save_pretrained(tmp_path)
    session = open_session(f"{tmp_path}/base.py", str(tmp_path), ParallelDims())
    with pytest.raises(NotImplementedError):
        session.replaced.get_input_embeddings()
    assert session.plan.ends == ("model.inner.embed_tokens.weight", "lm_head.weight")


ENDS = """
import copy

from torch import nn

from tests.language.replacing import Around


class Table(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.table = inner.weight

    def forward(self, ids):
        return nn.functional.embedding(ids, self.table)


class Product(Table):
    def forward(self, x):
        return x @ self.table.T


class Base(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.table, self.inner = inner.embed_tokens.weight, copy.copy(inner)
        self.inner._modules = {**inner._modules, "embed_tokens": None}

    def forward(self, input_ids, **named):
        return self.inner(**{**named, "inputs_embeds": nn.functional.embedding(input_ids, self.table)})


def wrapped(sch, layout):
    for path in ("transformer.wte", "lm_head"):
        sch[path].replace(Around)


def head(sch, layout):
    sch["lm_head"].replace(Around)


def renamed(sch, layout):
    sch["transformer.wte"].replace(Table)
    sch["lm_head"].replace(Product)


def in_base(sch, layout):
    sch["model"].replace(Base)
"""


@pytest.mark.parametrize(
    ("model_type", "schedule", "ends"),
    [
        ("gpt2", "wrapped", ("transformer.wte.inner.weight", "lm_head.inner.weight")),
        ("gpt2", "head", ("transformer.wte.weight", "lm_head.inner.weight")),
        ("gpt2", "renamed", ("transformer.wte.table", "lm_head.table")),
        ("llama", "in_base", ("model.table", "lm_head.weight")),
    ],
)
def test_each_end_has_its_own_name_of_the_table(model_type, schedule, ends, tmp_path):
    """A tied table has two; a stage of the pipeline has the module of one."""
    (tmp_path / "ends.py").write_text(ENDS)
    tiny_config(model_type).save_pretrained(tmp_path)
    assert open_session(f"{tmp_path}/ends.py:{schedule}", str(tmp_path), ParallelDims()).plan.ends == ends
