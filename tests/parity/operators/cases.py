"""Cases of torch's own database of operators: which sample, cut along which dimension, standing where."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.parity.operators.definition import Call, Form

LARGEST = 1500  # elements of a sample
MOST_ROWS = 64
MOST_FEATURES = 512
# Sizes by which the database makes its samples, odd ones as torch has them: those can't be cut over two ranks.
EVEN = {"S": 6, "XS": 4}
AS_THEY_ARE = {"S": 5, "XS": 3}
# Give what nobody has set.
WITHOUT_VALUES = frozenset(
    ["empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"]
)


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        operator: its name, with its variant, and ``_`` behind that for the form in place.
        sample: which of the database.
        tensors: of the sample, by their positions.
    """

    operator: str
    sample: int
    call: Call
    tensors: dict[int, torch.Tensor]

    def __str__(self) -> str:
        call = self.call
        shapes = {index: list(tensor.shape) for index, tensor in self.tensors.items()}
        values = [value for index, value in enumerate(call.values) if index not in shapes]
        how = f"{call.form}{' direct' if call.direct else ''}, columns {list(call.columns)} along {call.dim}"
        return f"{self.operator}#{self.sample} {how}: {shapes} {values}"


@cache
def operators() -> dict[str, Any]:
    """All that take float32, by their names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    found = {".".join(filter(None, (op.name, op.variant_test_name))): op for op in op_db}
    takes = {name: op for name, op in found.items() if torch.float32 in op.supported_dtypes("cpu")}
    return {name: op for name, op in takes.items() if op.name not in WITHOUT_VALUES}


def cases_of(name: str, samples: int, dims: int = 1) -> list[Case]:
    """Cases of one operator, the same in every process.

    Args:
        samples: at most so many of the database.
        dims: at most so many of each sample, along which it is cut.
    """
    operator = operators()[name]
    found = [pair for pair in enumerate(_samples_of(operator)) if _can_be_cut(pair[1])]
    chosen = found[:: max(1, len(found) // samples)][-samples:]
    forms = [(name, operator.op)] + [(f"{name}_", form) for form in [operator.get_inplace()] if form]
    cases = []
    for number, (index, sample) in enumerate(chosen):
        for form_name, function in forms:
            if function is operator.op or not sample.broadcasts_input:
                cases += _ways(form_name, function, index, sample, dims, first=number == 0)
    return cases


def _samples_of(operator: Any) -> list[Any]:
    for sizes in (EVEN, AS_THEY_ARE):
        torch.manual_seed(0)
        try:
            with _sizes(sizes), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return list(islice(operator.sample_inputs("cpu", torch.float32, requires_grad=False), 60))
        except (RuntimeError, IndexError):  # some samples are written for the sizes as they are
            continue
    return []


@contextmanager
def _sizes(sizes: dict[str, int]) -> Iterator[None]:
    modules = [module for name, module in sys.modules.items() if name.startswith("torch.testing._internal")]
    held = [(module, name) for module in modules for name in sizes if type(getattr(module, name, None)) is int]
    before = [getattr(module, name) for module, name in held]
    for module, name in held:
        setattr(module, name, sizes[name])
    try:
        yield
    finally:
        for (module, name), value in zip(held, before, strict=True):
            setattr(module, name, value)


def _flattened(sample: Any) -> tuple[list[Any], pytree.TreeSpec]:
    return pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))


def _main(values: list[Any]) -> int | None:
    """Position of the first tensor that can be cut over two ranks."""
    tensors = {index: value for index, value in enumerate(values) if isinstance(value, torch.Tensor)}
    dense = {i: t for i, t in tensors.items() if t.dtype == torch.float32 and t.layout == torch.strided}
    return next((index for index, tensor in dense.items() if tensor.numel() and _dims(tensor)), None)


def _dims(tensor: torch.Tensor) -> list[int]:
    """Dimensions along which it can be cut, the last one first."""
    shape = tensor.shape
    sizes = [(shape[:dim].numel(), shape[dim:].numel()) for dim in range(tensor.dim())]
    fit = [rows <= MOST_ROWS and features <= MOST_FEATURES for rows, features in sizes]
    return [dim for dim in reversed(range(tensor.dim())) if fit[dim] and shape[dim] % 2 == 0]


def _can_be_cut(sample: Any) -> bool:
    values, _ = _flattened(sample)
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return _main(values) is not None and sum(tensor.numel() for tensor in tensors) <= LARGEST


def _ways(name: str, function: Any, index: int, sample: Any, dims: int, *, first: bool) -> Iterator[Case]:
    values, spec = _flattened(sample)
    main = _main(values)
    assert main is not None
    tensors = {i: v.detach().clone() for i, v in enumerate(values) if isinstance(v, torch.Tensor)}
    plain = tuple(None if i in tensors else v for i, v in enumerate(values))
    x = tensors[main]
    alike = tuple(i for i, v in tensors.items() if v.shape == x.shape and v.dtype == x.dtype and i != main)
    for dim in _dims(x)[:dims]:
        call = Call(function, plain, spec, (main,), tuple(x.shape), dim, "between")
        calls = [call]
        if alike:
            calls.append(replace(call, columns=(main, *alike)))
        if x.dim() in (2, 3) and dim == x.dim() - 1 and len(tensors) == 1 and first:
            calls.append(replace(call, direct=True))
        forms: tuple[Form, ...] = ("between", "gate")
        for form in forms:
            for each in calls:
                yield Case(name, index, replace(each, form=form), tensors)
