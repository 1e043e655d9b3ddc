"""Linears take tensors of any number of dimensions, as torch's do; Megatron's take two or three."""

import torch

from megasched.verify.ranks.pool import init_megatron
from tests.language.sharding import column_row
from tests.lowering.models import Mlp, randomize
from tests.lowering.parity import compare, too_far


class Pooled(Mlp):
    """One vector of features for all tokens."""

    def forward(self, x):
        return x + super().forward(x.mean((0, 1)))


class Grouped(Mlp):
    """Tokens in groups: [b, s, 8] -> [b, 1, s, 8] and back."""

    def forward(self, x):
        return super().forward(x[:, None])[:, 0]


class Gathered(Pooled):
    """What comes between needs all features."""

    def forward(self, x):
        pooled = self.up(x.mean((0, 1))).softmax(-1)
        return x + self.down(pooled) + self.down(self.up(x[:, None]).softmax(-1))[:, 0]


def _compared():
    init_megatron(tp=2)
    x = {"x": torch.linspace(-1, 1, 2 * 3 * 8).reshape(2, 3, 8)}
    return [too_far(compare(randomize(make()), column_row, x, x)) for make in (Pooled, Grouped, Gathered)]


def test_linears_take_any_number_of_dimensions(ranks):
    assert ranks.run(2, _compared) == [[{}, {}, {}]] * 2
