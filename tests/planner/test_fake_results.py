"""The short way of operations on fake tensors: it never gives something else than the mode itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megasched.planner.measure.fake_results import FakeResults
from megasched.planner.measure.live_bytes import LiveBytes


class Short(TorchDispatchMode):
    """Operations are carried out the short way."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.results = FakeResults(fake)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.results.call(func, args, kwargs or {})


@contextmanager
def short() -> Iterator[LiveBytes]:
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, Short(fake), LiveBytes() as live:
        yield live


@contextmanager
def long() -> Iterator[LiveBytes]:
    with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
        yield live


def _trained(forward: Any, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Outputs and gradients."""
    inputs = [torch.zeros(shape, requires_grad=True) for shape in shapes]
    output = forward(*inputs)
    first = output[0] if isinstance(output, tuple) else output
    return [*tree_leaves(output), *torch.autograd.grad(first.float().sum(), inputs, allow_unused=True)]


PROGRAMS = {
    "views": lambda: [
        (x := torch.zeros(4, 6)).t(),
        x[1:, ::2],
        *x.split([2, 4], dim=1),
        x.view(2, 12),
        x.expand(3, 4, 6),
        x.detach(),
        *x.unbind(0),
        x.real,
    ],
    "new tensors": lambda: [torch.zeros(3), torch.ones(2, 3, dtype=torch.bfloat16) + 1, torch.arange(5).exp()],
    "several outputs": lambda: [*torch.zeros(4, 6).topk(2), *torch.zeros(4, 6).max(dim=0)],
    "strides": lambda: [
        torch.zeros(4, 6).t() * 2,
        torch.zeros(4, 6).t().clone(),
        torch.zeros(4, 6).t().contiguous(),
    ],
    "in place": lambda: [torch.zeros(4).add_(1), torch.zeros(4)[1:].mul_(2), torch.zeros(4).t_()],
    "a storage that the schema does not tell of": lambda: [torch.ops.aten._unsafe_view(torch.zeros(4, 6), [24])],
    "matrix products": lambda: _trained(lambda x, w: F.linear(x, w), (2, 3, 4), (5, 4)),
    "attention": lambda: _trained(F.scaled_dot_product_attention, (2, 4, 8, 16), (2, 4, 8, 16), (2, 4, 8, 16)),
    "a norm": lambda: _trained(lambda x, w: F.layer_norm(x, (8,), w), (2, 8), (8,)),
    "dropout": lambda: _trained(lambda x: F.dropout(x, 0.5), (4, 4)),
    "a loss": lambda: _trained(lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long)), (4, 9)),
    "a parameter of a definition": lambda: [nn.Parameter(torch.empty(3, 2, device="meta")).t() + 1],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_gives_what_the_mode_gives(name: str):
    with long() as wanted_live:
        wanted = PROGRAMS[name]()
    for _ in range(2):  # the second time most of it is remembered
        with short() as live:
            found = PROGRAMS[name]()
        assert [_looks(one) for one in found] == [_looks(one) for one in wanted]
        assert _storages(found) == _storages(wanted)
        assert (live.now, live.peak) == (wanted_live.now, wanted_live.peak)


def _looks(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    return type(tensor), tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device


def _storages(tensors: list[torch.Tensor | None]) -> list[int]:
    """For each tensor the first one that shares its storage."""
    first: dict[int, int] = {}
    given = [tensor for tensor in tensors if tensor is not None]
    return [first.setdefault(tensor.untyped_storage()._cdata, index) for index, tensor in enumerate(given)]


def test_single_numbers_keep_their_values():
    """The mode knows that of a tensor made of a number, and computes with it."""
    with short():
        for number in (3, 5):
            assert int(torch.tensor(number) + 1) == number + 1


def test_without_the_mode_numbers_are_computed():
    with short():
        torch.ones(2) * 3
        with unset_fake_temporarily():
            product = torch.ones(2) * 3
    assert product.tolist() == [3.0, 3.0]
    assert not isinstance(product, FakeTensor)


def test_a_mode_gives_tensors_of_its_own():
    for _ in range(2):
        with FakeTensorMode() as fake, Short(fake):
            assert (torch.zeros(7) + 1).fake_mode is fake
