"""What a trial call answers where a model asks for values."""

import torch
from torch import nn

from megasched.trial.meta_call import meta_copy, run_on_meta


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
