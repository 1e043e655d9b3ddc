"""Tries with numbers whether a given instance of a module computes the same as its replacement.

The class alone does not show it: arguments of the constructor, or later changes, may alter the computation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

# Of the values that are tried, so that clamps and branches are met.
_SCALES = (1.0, 1e-3, 30.0, 1e4)
_LARGE = 1e3  # parameters, the same
# Sizes of inputs, but for their features: code may go by how many rows, tokens, heads or dimensions there are.
_LEADING = ((2, 3), (4,), (5, 67), (2, 3, 2), (1, 4099))
_LARGEST = 2**20  # elements of an input

# What torch keeps on every module.
_TORCH = frozenset(["_parameters", "_buffers", "_modules"])


class Itself:
    """Wraps an object that equals only itself, such as a config that all layers share."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@contextmanager
def real_tensors() -> Iterator[None]:
    """Runs its body with real tensors on the CPU.

    Plans are made under modes that give tensors no values, answer questions about them, and count operations;
    these are turned off.
    """
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), unset_fake_temporarily(), torch.device("cpu"):
        yield


def calls_forward(module: nn.Module) -> bool:
    """Returns whether calling the module runs its forward and its hooks: no class of it overrides ``__call__``."""
    from torch import nn

    return all(getattr(type(module), name) is getattr(nn.Module, name) for name in ("__call__", "_call_impl"))


def is_of_transformers(module: nn.Module, method: str = "forward") -> bool:
    """Returns whether a method of a module's class is code of transformers.

    A trial compares what a forward returns. Code of others may leave something behind as well: a term of the loss
    in a list, say. So it is not replaced.
    """
    code = getattr(type(module), method, None)
    return code is not None and code.__module__.startswith("transformers.")


def comparable_state(module: nn.Module) -> Any:
    """Returns a key that is equal for instances that compute the same but for values and sizes of parameters.

    It is None for a module with buffers, as their values matter.
    """
    if any(held is not None for held in module._buffers.values()):
        return None
    plain = []
    for name, value in vars(module).items():
        if name in _TORCH or (name.startswith("_") and not value):
            continue
        alike = value is None or callable(value) or isinstance(value, bool | int | float | str)
        plain.append((name, type(value), value if alike else Itself(value)))
    parameters = tuple((name, held is None) for name, held in module._parameters.items())
    # Results are kept, and a class may get another forward meanwhile.
    code = type(module), type(module).forward
    return code, tuple(sorted(plain, key=lambda item: item[0])), parameters


def tree_state(module: nn.Module) -> Any:
    """Returns a key like ``comparable_state``'s for a module and all its submodules, shapes included."""
    parts = []
    for name, part in module.named_modules():
        state = comparable_state(part)
        if state is None:
            return None
        parts.append((name, state, tuple(held.shape for held in part.parameters(recurse=False))))
    return tuple(parts)


def tried_once[T](known: dict[Any, T], state: Any, trial: Callable[[], T]) -> T:
    """Returns the result of a trial, which runs once for all instances with the same state.

    If the state is None, it runs for each instance.
    """
    if state is None:
        return trial()
    if state not in known:
        known[state] = trial()
    return known[state]


def small_copy(module: nn.Module, shapes: Mapping[str, Sequence[int]]) -> Any:
    """Returns a copy of the instance with random parameters of other shapes, in float64 on the CPU."""
    import torch
    from torch import nn

    generator = torch.Generator().manual_seed(0)
    with real_tensors():
        made = {
            name: nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu"))
            for name, shape in shapes.items()
        }
    small = copy.copy(module)
    small.__dict__ = {**vars(module), "_parameters": {**module._parameters, **made}}
    return small


def computes(
    small: nn.Module,
    function: Callable[[torch.Tensor], torch.Tensor],
    features: int,
    scales: Sequence[float] = (),
    tolerance: float = 1e-9,
) -> bool:
    """Returns whether a module and a function agree, forward and backward, in training and evaluation.

    Inputs of all sizes that the module accepts are compared.

    Args:
        small: module with real parameters, in float64.
        function: computes with the same parameters.
        features: size of the input's last dimension.
        scales: further scales of inputs that reveal differences, besides the standard ones.
        tolerance: relative; a module that casts to float32 needs a larger one.
    """
    import torch

    from megasched.definition.undisturbed import undisturbed

    if not calls_forward(small):  # hooks go where it goes, so its forward is tried
        return False
    # A plan must not change what a run draws.
    with undisturbed(small), real_tensors(), torch.random.fork_rng(devices=[]), torch.enable_grad():
        taken = [shape for shape in _shapes(features) if _takes(small, shape)]
        for vars(small)["training"] in (True, False):
            for shape in taken:
                some = (1.0,) if shape is not taken[0] else (*_SCALES, *scales)
                if not all(_same(small, function, scale, shape, tolerance) for scale in some):
                    return False
        for held in small.parameters(recurse=False):
            held.data.mul_(_LARGE)
        return bool(taken) and _same(small, function, 1.0, taken[0], tolerance)


def _shapes(features: int) -> list[tuple[int, ...]]:
    """Returns shapes of trial inputs; with many features, the longest has fewer tokens."""
    return [(*sizes[:-1], max(1, min(sizes[-1], _LARGEST // features)), features) for sizes in _LEADING]


def _takes(small: Any, shape: Sequence[int]) -> bool:
    """Returns whether the module accepts an input of this shape; no run gives it one that it fails on."""
    import torch

    with suppress(Exception), torch.no_grad():  # of whatever kind, of the definition's code
        small.forward(torch.ones(*shape, dtype=torch.float64))
        return True
    return False


def _same(
    small: Any,
    function: Callable[[torch.Tensor], torch.Tensor],
    scale: float,
    shape: Sequence[int],
    tolerance: float,
) -> bool:
    import torch

    generator = torch.Generator().manual_seed(1)
    x = (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).requires_grad_()
    sources = [x, *(held for held in small._parameters.values() if held is not None)]
    try:
        got = small.forward(x)
        if not isinstance(got, torch.Tensor):
            return False
        found = [got, *gradients_of(got, sources)]
    except Exception:  # of whatever kind: what can't be called so is something else
        return False
    want = function(x)
    expected = [want, *gradients_of(want, sources)]
    return all(close(one, other, tolerance) for one, other in zip(found, expected, strict=True))


def gradients_of(output: torch.Tensor, sources: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Returns the gradients of a weighted sum of an output; None for a source that it does not depend on."""
    import torch

    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    return list(torch.autograd.grad((output * weights).sum(), sources, allow_unused=True))


def close(one: torch.Tensor | None, other: torch.Tensor | None, tolerance: float) -> bool:
    """Returns whether two tensors are finite and equal, relative to the largest expected element.

    A missing gradient (None) equals only a missing one.
    """
    import torch

    if one is None or other is None:
        return one is other
    if one.shape != other.shape or not torch.isfinite(other).all():
        return False
    largest = float(other.detach().abs().max()) if other.numel() else 0.0
    return torch.allclose(one.double(), other.double(), rtol=tolerance, atol=tolerance * largest)
