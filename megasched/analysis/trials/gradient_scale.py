"""Checks whether a definition's code depends on how large a gradient is.

Replicas take the mean of their gradients at the end, so in each replica a gradient is larger than at one rank, by
a factor of their number. Linear code is not affected. A hook that clips or normalizes a gradient is, and so is a
backward that does so.
"""

from __future__ import annotations

from typing import Any

import torch

from megasched.analysis.recording.backward_code import Function, handed_to_hooks
from megasched.analysis.recording.meta_call import tensors_in
from megasched.analysis.recording.stock import all_stock
from megasched.analysis.recording.tape import Call, Tape, TapeReader
from megasched.definition.instances import close, real_tensors
from megasched.errors import Problem

_SCALES = (1e-3, 0.5, 30.0)
_TOLERANCE = 1e-4


def why_by_scale(tape: Tape) -> Problem | None:
    """Returns the problem with code that depends, or may, on how large a gradient is; None without any."""
    if all_stock(tape.model):
        return None
    trials = _GradientTrials()
    tape.read(trials)
    return trials.found


class _GradientTrials(TapeReader):
    """Tries hooks on gradients, and functions with their own backward.

    Attributes:
        found: the first that depends on how large a gradient is.
    """

    def __init__(self) -> None:
        self.stack: list[str] = [""]
        self.found: Problem | None = None

    def enter(self, call: Call) -> None:
        self.stack.append(call.path)

    def leave(self, call: Call) -> None:
        if handed_to_hooks(call.module, call.output):
            self._find("its backward hooks are handed gradients")
        self.stack.pop()

    def custom_function(self, function: Function, args: tuple[Any, ...], output: Any) -> None:
        if not _function_scales(function, args):
            self._find(f"the backward of {function.__name__} goes by how large a gradient is")

    def hook_registered(self, tensor: torch.Tensor, hook: Any) -> None:
        if not _hook_scales(hook, tensor):
            self._find("a hook on a gradient goes by how large that is")

    def grad_fn_read(self, tensor: torch.Tensor) -> None:
        self._find("its code reads grad_fn, where it may register hooks on gradients")

    def _find(self, what: str) -> None:
        what += ", and on each of several replicas it is larger than at one rank"
        self.found = self.found or Problem(what, self.stack[-1], remedy="run it without DP and CP")


def _hook_scales(hook: Any, tensor: torch.Tensor) -> bool:
    def changed(grad: torch.Tensor) -> torch.Tensor:
        given = hook(grad)
        return grad if given is None else given

    with real_tensors(), torch.no_grad():
        grad = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
        try:
            one = changed(grad.clone())
            return all(close(changed(grad * scale), one * scale, _TOLERANCE) for scale in _SCALES)
        except Exception:  # of whatever kind: what can't be tried is not known
            return False


def _function_scales(function: Function, args: tuple[Any, ...]) -> bool:
    generator = torch.Generator().manual_seed(0)

    def numbers(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        return torch.randn(tensor.shape, generator=generator).to(tensor.dtype).requires_grad_()

    with real_tensors(), torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            values = torch.utils._pytree.tree_map_only(torch.Tensor, numbers, args)
            inputs = [tensor for tensor in tensors_in(values) if tensor.requires_grad]
            # Views, since a function may write to what it is handed, and a leaf is not to be written to.
            given = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.view_as(t), values)
            outputs = [tensor for tensor in tensors_in(function.apply(*given)) if tensor.requires_grad]
            grads = [torch.randn(output.shape, generator=generator).to(output.dtype) for output in outputs]

            def gradients(scale: float) -> list[torch.Tensor | None]:
                scaled = [grad * scale for grad in grads]
                return list(torch.autograd.grad(outputs, inputs, scaled, retain_graph=True, allow_unused=True))

            one = gradients(1.0)
            return all(
                close(found, want if want is None else want * scale, _TOLERANCE)
                for scale in _SCALES
                for found, want in zip(gradients(scale), one, strict=True)
            )
        except Exception:  # of whatever kind: what can't be tried is not known
            return False
