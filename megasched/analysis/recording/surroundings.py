"""Refuses changes that a definition makes around its module calls, and that a run's modules would not follow."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from megasched.analysis.recording.stock import is_theirs
from megasched.definition.linears import is_linear
from megasched.errors import Problem, ScheduleError

_DEVICES = ("cpu", "cuda")


class Surroundings:
    """Holds the forwards of a model's modules and the active modes, to detect changes to them.

    Args:
        model: the model before it runs.
    """

    def __init__(self, model: nn.Module) -> None:
        self._forwards = {path: _forward_function(module) for path, module in model.named_modules()}
        self._modes: list[Any] = []

    def check(self, path: str, module: nn.Module) -> None:
        """Refuses changes that the running model has made around a module, just before it is called.

        Raises:
            ScheduleError: another function has replaced the module's forward, or a linear is called while
                functions or operations of torch are altered, or under autocast.
        """
        what = remedy = ""
        if not path:  # called by the run, with modes of its own
            self._modes = _modes()
        if _forward_function(module) is not self._forwards[path]:
            what = "the model's code puts another function in the place of its forward while it runs, and it is "
            what += "looked at as it was before"
            remedy = "put it there before the model is made, or make a class that has it"
        elif is_linear(module):
            if any(map(torch.is_autocast_enabled, _DEVICES)):
                what = "it is called under torch.autocast, and a run's linears compute in their weights' dtype"
                remedy = "leave precision to Megatron's flags (--bf16, --fp16), or cast what it is handed"
            elif modes := [mode for mode in _modes() if mode not in self._modes]:
                what = f"it is called under a {type(modes[0]).__name__}, which alters torch's functions, and a "
                what += "run's linears call others"
                remedy = "have its module's forward do what that does"
        if what:
            raise ScheduleError(Problem(what, path, remedy=remedy))


def _modes() -> list[Any]:
    """Returns the active function and dispatch modes of the process, without torch's and transformers'."""
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    return [mode for mode in modes if not is_theirs(type(mode))]


def _forward_function(module: nn.Module) -> Any:
    """Returns the forward of an instance or of its class as a plain function, not as a bound method."""
    return vars(module).get("forward", type(module).forward)
