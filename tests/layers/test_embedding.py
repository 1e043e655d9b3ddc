"""The sharded vocabulary: every id, values and gradient, at a size that divides by no TP."""

import pytest
import torch
from torch import nn

import megasched
from megasched.errors import ConfigError
from megasched.layers.embedding import ShardedLookup, VocabEmbedding
from megasched.verify.ranks.pool import init_megatron
from tests.lowering.models import VOCABULARY, randomize
from tests.lowering.parity import scheduled_copy

HIDDEN = 6


class Table(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, ids):
        return self.table(ids)


class Scaled(nn.Embedding):
    """As Gemma has it: what is looked up is scaled, by a buffer."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_buffer("scale", torch.tensor(3.0), persistent=False)

    def forward(self, ids):
        return super().forward(ids) * self.scale


class Offset(nn.Embedding):
    """As OPT's positions are: called with another name, shifted, two rows more."""

    def __init__(self, rows, width):
        super().__init__(rows + 2, width)

    def forward(self, ids, *, start=0):
        return super().forward(ids + start + 2)


TABLES = {
    "plain": lambda: nn.Embedding(VOCABULARY, HIDDEN),
    "padding first": lambda: nn.Embedding(VOCABULARY, HIDDEN, padding_idx=0),
    "padding last": lambda: nn.Embedding(VOCABULARY, HIDDEN, padding_idx=-1),
    "padding at the second shard's first": lambda: nn.Embedding(VOCABULARY, HIDDEN, padding_idx=50),
    "scaled": lambda: Scaled(VOCABULARY, HIDDEN, padding_idx=7),
    "offset": lambda: Offset(VOCABULARY - 2, HIDDEN),
}


def _every_id(tp):
    """For each table: the ids whose values differ, and the rows whose gradients do."""
    init_megatron(tp=tp)
    found = {}
    for name, make in TABLES.items():
        model = randomize(Table(make()))
        reachable = VOCABULARY - 2 if name == "offset" else VOCABULARY
        ids = torch.arange(reachable)
        built, plan, _ = scheduled_copy(model, lambda sch: sch["table"].shard("weight", axis=0), {"ids": ids})
        # every id apart, so that a wrong one shows by itself; each has a gradient of its own
        weights = torch.arange(1.0, reachable + 1).unsqueeze(-1) * torch.linspace(0.5, 2, HIDDEN)
        outputs = []
        for each in (built, model):
            outputs.append(torch.cat([each(ids[i : i + 1]) for i in range(reachable)]))
            (outputs[-1] * weights).sum().backward()
        every = [None] * tp
        torch.distributed.all_gather_object(every, built.table.weight.grad)
        placement = plan.placement("table", "weight")
        difference = placement.unshard(every) - model.table.weight.grad
        found[name] = {
            "values": (outputs[0] != outputs[1]).any(-1).nonzero().flatten().tolist(),
            "gradients": difference.any(-1).nonzero().flatten().tolist(),
            "none for padding": model.table.padding_idx is None
            or not model.table.weight.grad[model.table.padding_idx].any(),
            "padded rows": float(torch.cat(every)[VOCABULARY:].abs().sum()),
            "shard": tuple(built.table.weight.shape),
            "ranges": [placement.ranges(rank, tp)[0] for rank in range(tp)],
        }
    return found


@pytest.mark.parametrize(
    ("tp", "rows", "ranges"),
    [(2, 50, [(0, 50), (50, 99)]), (4, 25, [(0, 25), (25, 50), (50, 75), (75, 99)])],
)
def test_every_id_and_every_row(ranks, tp, rows, ranges):
    want = {
        "values": [],
        "gradients": [],
        "none for padding": True,
        "padded rows": 0.0,
        "shard": (rows, HIDDEN),
        "ranges": ranges,
    }
    for found in ranks.run(tp, _every_id, tp):
        assert found == dict.fromkeys(TABLES, want)


def _classes():
    init_megatron(tp=2)
    found = {}
    for name in ("plain", "scaled"):
        model = Table(TABLES[name]())
        model.table.register_forward_hook(lambda module, args, output: output + 1)
        built, _, _ = scheduled_copy(model, lambda sch: sch["table"].shard("weight", axis=0))
        built.eval()
        ids = torch.arange(8)
        found[name] = {
            "is": [cls.__name__ for cls in type(built.table).__mro__[:3]],
            "sharded": isinstance(built.table, VocabEmbedding | ShardedLookup),
            "isinstance": isinstance(built.table, type(model.table)),
            "hooked": torch.equal(built(ids), model(ids)),
            "keys": list(built.state_dict()),
            "attribute": (built.table.weight.tensor_model_parallel, built.table.weight.partition_dim),
        }
    return found


def test_a_subclass_stays_one_and_keeps_its_forward_and_hooks(ranks):
    for found in ranks.run(2, _classes):
        assert found["plain"]["is"][0] == "VocabEmbedding"
        assert found["scaled"]["is"] == ["VocabParallelScaled", "Scaled", "ShardedLookup"]
        assert found["scaled"]["isinstance"]
        for each in found.values():
            assert each["sharded"]
            assert each["hooked"]
            assert each["keys"] == ["table.weight"]
            assert each["attribute"] == (True, 0)


def _beyond():
    """What is said of ids beyond each table, at either end."""
    init_megatron(tp=2)
    said = {}
    for name, make in TABLES.items():
        model = Table(make())
        schedule = megasched.create_schedule(model)
        schedule["table"].shard("weight", axis=0)
        megasched.build(schedule, inputs={"ids": torch.zeros(2, 3, dtype=torch.long)})
        for id_ in (VOCABULARY, -3):
            try:
                model(torch.tensor([[0, id_]]))
                said[name, id_] = ""
            except ConfigError as error:
                said[name, id_] = str(error)
    return said


def test_ids_beyond_it_are_refused_in_library_mode(ranks):
    for said in ranks.run(2, _beyond):
        for (name, id_), words in said.items():
            shown = id_ + 2 * (name == "offset")
            assert words == (
                "the ids of table of this batch: an id is none of the vocabulary, which ends with "
                f"{VOCABULARY - 1}; {shown} at [0, 1]: the data are of another tokenizer"
            )
