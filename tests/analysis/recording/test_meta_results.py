"""What a trial call remembers of operations on meta: never something else than computing again would give."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megasched.analysis.recording.meta_results import MetaResults


class Remembering(TorchDispatchMode):
    """Compares every output with one that is computed anew."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[Any, Any] = {}
        self.results = MetaResults(self.given)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = self.results.call(func, args, kwargs or {})
        expected = func(*args, **(kwargs or {})) if func._schema.name != "aten::add_" else output
        for found, wanted in zip(_leaves(output), _leaves(expected), strict=True):
            assert (found.shape, found.stride(), found.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
        return output


def _leaves(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def halves() -> torch.Tensor:
    return meta(2, dtype=torch.long) / 2


def in_float64(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        return call()
    finally:
        torch.set_default_dtype(torch.float32)


CALLS = {
    "same again": [lambda: meta(2, 3) * meta(2, 3)] * 3,
    "another shape": [lambda: meta(2, 3).sum(), lambda: meta(3, 2).sum(0)],
    "another dtype": [lambda: meta(2) + meta(2), lambda: meta(2, dtype=torch.bfloat16) + meta(2)],
    "equal numbers of other types": [
        lambda: meta(2, dtype=torch.long) * 1,
        lambda: meta(2, dtype=torch.long) * 1.0,
        lambda: meta(2, dtype=torch.bool) * True,
    ],
    "another default dtype": [halves, lambda: in_float64(halves)],
    "another stride": [
        lambda: meta(4, 4).t().contiguous(),
        lambda: meta(4, 4).exp(),
        lambda: meta(4, 4).t().exp(),
    ],
    "several outputs": [lambda: meta(4, 6).topk(2)] * 2,
    "a list of operands": [
        lambda: torch.cat([meta(2, 3), meta(4, 3)]),
        lambda: torch.cat([meta(4, 3), meta(4, 3)]),
    ],
    "a keyword": [
        lambda: torch.ops.aten.sum.dim_IntList(meta(2, 3), [1], keepdim=True),
        lambda: torch.ops.aten.sum.dim_IntList(meta(2, 3), [1]),
    ],
}


@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS.keys())
def test_gives_what_computing_again_gives(calls: list[Any]) -> None:
    with Remembering(), torch.no_grad():
        for call in calls:
            call()


def test_every_output_is_a_tensor_of_its_own() -> None:
    x = meta(2, 3)
    with Remembering():
        assert x.exp() is not x.exp()


def test_a_storage_that_is_handed_out_again_stays_the_same() -> None:
    """The schema of ``_unsafe_view`` has it that it makes a new tensor."""
    x, y = meta(2, 3), meta(2, 3)
    with Remembering():
        for tensor in (x, y, x):
            view = torch.ops.aten._unsafe_view(tensor, [6])
            assert view.untyped_storage()._cdata == tensor.untyped_storage()._cdata


def test_a_view_stays_a_view_and_what_is_in_place_stays_in_place() -> None:
    x, y = meta(2, 3), meta(2, 3)
    with Remembering():
        for tensor in (x, y, x):
            assert tensor.t()._base is tensor
            assert tensor.add_(1) is tensor


def test_layers_alike_are_computed_once() -> None:
    computed = []
    for layers in (2, 6):
        model = torch.nn.Sequential(*[torch.nn.Linear(4, 4, device="meta") for _ in range(layers)])
        with torch.no_grad(), Remembering() as mode:
            model(meta(3, 4))
        computed.append(len(mode.given))
    assert computed[0] == computed[1] > 0


def test_a_run_remembers_what_the_run_before_has_computed() -> None:
    given: dict[Any, Any] = {}
    first, second = MetaResults(given), MetaResults(given)
    exp = torch.ops.aten.exp.default
    first.call(exp, (meta(2, 3),), {})
    assert len(given) == 1
    again = second.call(exp, (meta(2, 3),), {})
    assert (len(given), again.shape, again.device.type) == (1, (2, 3), "meta")


def test_operators_of_other_libraries_are_asked_each_time() -> None:
    sizes = iter((2, 3))

    @torch.library.custom_op("megasched_test::of_a_state", mutates_args=())
    def of_a_state(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(next(sizes))

    of_a_state.register_fake(lambda x: x.new_empty(next(sizes)))
    results = MetaResults({})
    operator = torch.ops.megasched_test.of_a_state.default
    assert [len(results.call(operator, (meta(1),), {})) for _ in range(2)] == [2, 3]
