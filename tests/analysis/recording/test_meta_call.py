"""What a trial call answers where a model asks for values."""

import torch
from torch import nn

from megasched.analysis.recording.meta_call import meta_copy, run_on_meta


class Asks(nn.Module):
    """Sorts its rows by a mask and by counts, as routers do."""

    def forward(self, x):
        chosen = torch.zeros_like(x)
        mask = x[..., 0] > 0
        chosen[mask] = x[mask] * 2
        sizes = (x[..., 0] > 0).long().sum(0).tolist()
        self.seen = [sizes, torch.is_grad_enabled()]
        return chosen, x.split(sizes, dim=1)


def test_masks_select_one_place_and_counts_give_all_to_the_first():
    model = meta_copy(Asks())
    chosen, parts = run_on_meta(model, {"x": torch.zeros(2, 3, 4, device="meta")})
    assert chosen.shape == (2, 3, 4)
    assert model.seen == [[0, 0, 0], False]
    assert [part.shape[1] for part in parts] == [3, 0, 0]


def test_autograd_is_on_where_it_is_asked_for():
    model = meta_copy(Asks())
    run_on_meta(model, {"x": torch.zeros(2, 3, 4, device="meta")}, autograd=True)
    assert model.seen[1] is True


class Holder(nn.Module):
    """Modules that share an object, and one another under two names."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.again, self.missing = self.first, None
        self.told = []
        self.first.told = self.second.told = self.told
        self.first.holders = [self]
        self.register_buffer("table", torch.arange(3.0))


def test_a_copy_shares_what_the_original_shares_and_nothing_with_it():
    model = Holder()
    model.first.register_forward_hook(lambda module, args, output: module.told.append(1))
    copied = meta_copy(model)
    assert [name for name, _ in copied.named_modules()] == [name for name, _ in model.named_modules()]
    assert copied.again is copied.first
    assert copied.second.weight is copied.first.weight
    assert copied.first.told is copied.second.told is copied.told
    assert copied.first.holders[0] is copied
    assert all(tensor.is_meta for tensor in (*copied.parameters(), *copied.buffers()))
    copied.first(torch.empty(1, 2, device="meta"))
    assert (copied.told, model.told) == ([1], [])
    assert not model.first.weight.is_meta
