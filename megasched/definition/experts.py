"""Finds HF's modules of experts, each of which holds all of a layer's experts in one tensor per parameter.

transformers gives such a class one form (``use_experts_implementation`` in transformers/integrations/moe.py): it
counts ``num_experts``, each parameter has an entry per expert along its first axis, and it is called with tokens
[t, h], their experts [t, k] and the weights of these [t, k]. Llama 4's are batched: they are called with rows
[experts * t, h], all tokens for each expert in turn, those that it is not to see multiplied by zero. LongCat's are
called as HF's are, but some have no parameters: numbers beyond those that have choose experts that return their
input. Modules are recognised by that form, not by name; a numeric trial then shows whether their experts can be
computed separately, and what numbers beyond them do (``expert_trials.py``).
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from megasched.definition import expert_trials

if TYPE_CHECKING:
    from torch import nn

# What the decorator leaves on every instance, in all supported versions.
MARKER = "is_transposed"
# rows alone, of batched experts; or tokens, experts of each, weights of these
_BATCHED, _ROUTED = 1, 3


def has_form(module: nn.Module) -> bool:
    """Returns whether a module has one of the two forms of HF's experts, whatever it computes."""
    own: Any = list(module.parameters(recurse=False))
    if not any(parameter.dim() == 3 for parameter in own) or not all(parameter.dim() for parameter in own):
        return False
    shared = any(True for child in module.children() for _ in child.parameters())
    lengths = {parameter.shape[0] for parameter in own}
    if isinstance(getattr(module, "num_experts", None), int):
        counted = lengths == {module.num_experts}
        taken = _BATCHED if is_batched(module) else _ROUTED
    else:  # it counts those that have parameters, and all, by names of its own
        counted = lengths <= {value for value in vars(module).values() if type(value) is int}
        taken = _ROUTED
    return not shared and counted and _arguments(module) == taken


def _arguments(module: nn.Module) -> int:
    return len(inspect.signature(type(module).forward).parameters) - 1


def expert_count(module: nn.Module) -> int:
    """Returns how many experts with parameters a module of their form has; some parameters may be longer."""
    return expert_trials.count(module)


def is_batched(module: nn.Module) -> bool:
    """Returns whether experts have the form in which each gets as many rows, as Llama 4's do."""
    return not hasattr(module, MARKER) and _arguments(module) == _BATCHED


def returns_beyond(module: nn.Module) -> bool:
    """Returns whether numbers beyond a module's experts choose ones that return their input.

    If they do not, they add nothing.
    """
    return not is_batched(module) and expert_trials.beyond(module) == "input"


def why_not_apart(module: nn.Module) -> str:
    """Returns why experts can't be computed separately; empty if they can."""
    return expert_trials.why_not_apart(module, batched=is_batched(module))


def is_experts(module: nn.Module) -> bool:
    """Returns whether subsets of a module's experts, and of its tokens, can be computed separately.

    A module that was not tried yet is tried with numbers, so do not call this first while a run is hooked or
    recorded.
    """
    return has_form(module) and not why_not_apart(module)


def find_experts(model: nn.Module) -> dict[str, int]:
    """Returns the number of experts of each module of experts in a model, by its path."""
    return {path: expert_count(module) for path, module in model.named_modules() if is_experts(module)}


def not_apart(model: nn.Module) -> dict[str, str]:
    """Returns the path of each module with only the form of experts, and why they can't be computed separately."""
    formed = ((path, module) for path, module in model.named_modules() if has_form(module))
    return {path: reason for path, module in formed if (reason := why_not_apart(module))}
