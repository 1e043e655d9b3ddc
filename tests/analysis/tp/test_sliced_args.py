"""Constants of which each rank takes its part: found by what a module's operations make of its arguments."""

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megasched.analysis.find_layer_stack import find_layer_stack, record_definition
from megasched.analysis.recording.meta_call import meta_copy
from megasched.analysis.tp.facts import TpAssumptions
from megasched.analysis.tp.propagate import propagate
from megasched.analysis.tp.sliced_args import ArgRef, ArgSlice, SlicedArgs
from megasched.definition import attention_interface
from megasched.language.tensor_types import ShardDim
from megasched.layers import attention

HEADS, HEAD_DIM = 4, 2
WIDTH = HEADS * HEAD_DIM


class Weighing(nn.Module):
    """Values of each head, weighed by what ``use`` makes of them and a tensor of all heads."""

    def __init__(self, use):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.use = use

    def forward(self, x, bias):
        heads = self.up(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)  # [b, heads, s, d]
        return self.down(self.use(heads, bias).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.mixer = Weighing(use)

    def forward(self, x, bias):
        return x + self.mixer(x, bias=bias)


class Toy(nn.Module):
    """A definition whose layers all get one tensor for all heads, made by ``make`` of batch and length."""

    main_input_name = "input_ids"

    def __init__(self, make, use):
        super().__init__()
        self.make = make
        self.embed, self.head = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 9)
        self.slopes = nn.Parameter(torch.ones(HEADS))
        self.layers = nn.ModuleList(Layer(use) for _ in range(2))

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        bias = self.make(self, *input_ids.shape)
        for layer in self.layers:
            x = layer(x, bias)
        return CausalLMOutput(logits=self.head(x))


def tp_facts(make, use):
    with torch.device("meta"):
        model = Toy(make, use)
    structure = find_layer_stack(model)
    cuts = {f"layers.{i}.mixer.{name}": cut for i in (0, 1) for name, cut in (("up", "column"), ("down", "row"))}
    tape = record_definition(meta_copy(model), structure)
    return propagate(tape, TpAssumptions(cuts, structure), loss_takes_shards=True)


def ones(*shape):
    return lambda model, batch, length: torch.ones([{"b": batch, "s": length}.get(n, n) for n in shape])


def add(heads, bias):
    return heads + bias


def merged(heads, bias):
    """As Bloom has it: batch and heads in one dimension."""
    keys = heads.transpose(2, 3).flatten(0, 1)
    return bias.baddbmm(heads.flatten(0, 1), keys).unflatten(0, heads.shape[:2]) @ heads


def attend(*operands, **options):
    """As definitions call it that leave attention to the interface."""
    return ALL_ATTENTION_FUNCTIONS[attention_interface.NAME](*operands, **options)


CASES = {
    "[b, heads, 1, d]": (ones("b", HEADS, 1, 2), add, (1, HEADS)),
    "[heads, 1, 1]": (ones(HEADS, 1, 1), add, (0, HEADS)),
    "[b*heads, 1, 1] viewed as heads": (
        lambda model, batch, length: torch.ones(batch * HEADS, 1, 1),
        lambda heads, bias: heads * bias.view(-1, HEADS, 1, 1),
        (0, HEADS),
    ),
    "[s, heads] sliced and transposed": (
        ones("s", HEADS),
        lambda heads, bias: heads + bias[1:2].t()[:, :, None],
        (1, HEADS),
    ),
    "[heads * d]": (ones(WIDTH), lambda heads, bias: heads + bias.view(HEADS, 1, HEAD_DIM), (0, WIDTH)),
    "added to a product": (
        lambda model, batch, length: torch.ones(batch * HEADS, 1, 1),
        merged,
        (0, HEADS),
    ),
    "met twice": (ones(HEADS, 1, 1), lambda heads, bias: (heads + bias) * bias.exp(), (0, HEADS)),
    "a mask for attention": (
        lambda model, batch, length: torch.arange(batch * HEADS * length).view(batch, HEADS, 1, length) * 1.0,
        lambda heads, bias: attend(nn.Identity(), heads, heads, heads, bias, scaling=1.0)[0].transpose(1, 2),
        (1, HEADS),
    ),
    "a mask": (
        lambda model, batch, length: torch.ones(HEADS, length, 1, dtype=torch.bool),
        lambda heads, bias: heads.masked_fill(bias, 0.0),
        (0, HEADS),
    ),
}


@pytest.fixture(autouse=True)
def attention_of_a_run():
    attention.register()


@pytest.mark.parametrize("case", CASES)
def test_an_argument_for_all_heads_is_cut(case):
    make, use, (dim, count) = CASES[case]
    found = tp_facts(make, use)
    assert not found.gather
    assert found.problems == []
    assert found.parts == {
        ArgRef(f"layers.{i}.mixer", "bias"): ArgSlice(dim, count, frozenset([f"layers.{i}.mixer.up"]))
        for i in (0, 1)
    }


WHOLE = {
    "it carries a gradient": (lambda model, batch, length: model.slopes.view(-1, 1, 1) * 1.0, add),
    "all of it is needed, too": (ones(HEADS, 1, 1), lambda heads, bias: (heads + bias) * bias.softmax(0)),
    "its heads are cut in two ways": (
        ones(HEADS, HEADS, 1),
        lambda heads, bias: heads + bias[:, :1] + bias[:1].transpose(0, 1),
    ),
    "it is not made of an argument": (
        ones(1),
        lambda heads, bias: heads + torch.ones(HEADS).cumsum(0).view(HEADS, 1, 1),
    ),
}


@pytest.mark.parametrize("case", WHOLE)
def test_what_cannot_be_cut_has_the_columns_gathered(case):
    found = tp_facts(*WHOLE[case])
    assert found.parts == {}
    assert found.gather.keys() == {"layers.0.mixer.up", "layers.1.mixer.up"}


def test_the_same_for_all_heads_needs_no_part():
    found = tp_facts(ones("b", 1, "s", 1), add)
    assert (found.parts, found.gather) == ({}, {})


def test_an_argument_is_asked_for_in_one_way_and_where_it_is_handed_over():
    parts, argument, columns = SlicedArgs({}), ArgRef("attn", "bias"), frozenset(["up"])
    x = torch.zeros(6, 5, device="meta")
    parts.offer(argument, x)
    sliced, turned = x[:, 1:3], x.t()
    parts.follow(torch.ops.aten.slice.Tensor, (x, 1, 1, 3), {}, [x], [sliced])
    parts.follow(torch.ops.aten.t.default, (x,), {}, [x], [turned])
    assert not parts.want([(sliced, ShardDim(1))], columns, "attn")  # a slice of what would be cut
    assert not parts.want([(turned, ShardDim(1))], columns, "another")
    assert parts.want([(turned, ShardDim(1, outer=2))], columns, "attn")
    assert not parts.want(
        [(sliced, ShardDim(0))], columns, "attn"
    )  # six of its first dimension, and not twice three
    assert parts.want([(sliced, ShardDim(0, outer=2))], frozenset(["gate"]), "attn")
    assert parts.wanted == {argument: ArgSlice(0, 3, frozenset(["up", "gate"]))}
    assert not SlicedArgs(parts.wanted).want(
        [(turned, ShardDim(1, outer=2))], columns, "attn"
    )  # it is cut already
