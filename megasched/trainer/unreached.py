"""Freezes parameters that training never reaches (``analysis/trials/reach.py``), such as a tower for images.

Without a gradient they stay as they are, as under plain PyTorch. Otherwise Megatron would have them in its
gradient buffers, decay their weights, keep optimizer states, and wait for their gradients under
``--overlap-grad-reduce``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from megasched.analysis.stages.layer_stack import LayerStack
from megasched.analysis.trials.reach import Reach
from megasched.errors import ConfigError, Problem, ScheduleError, some_of


def freeze_unreached(model: nn.Module, reach: Reach) -> None:
    """Sets ``requires_grad`` to False for parameters that are never reached."""
    parameters = dict(model.named_parameters())
    for name in reach.never:
        parameters[name].requires_grad_(False)


def unreached_lines(model: nn.Module, reach: Reach) -> list[str]:
    """Returns a line about parameters that training leaves as they are; empty where there are none."""
    if not reach.never:
        return []
    parameters = dict(model.named_parameters())
    size = sum(parameters[name].numel() for name in reach.never)
    return [
        f"{size:,} parameters have no part in the loss of these batches; they stay as they are and have no "
        f"optimizer state: {some_of(folded(model, reach.never))}"
    ]


def folded(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Folds parameters into the paths of the largest modules that have no others; the rest keep their names."""
    left, found = set(names), list[str]()
    for path, module in model.named_modules():
        held = {f"{path}.{name}" if path else name for name, _ in module.named_parameters()}
        if held and held <= left:
            found.append(path)
            left -= held
    return [*found, *(name for name in names if name in left)]


def refuse_unsure_overlap(reach: Reach, structure: LayerStack | None, overlap_grad_reduce: bool) -> None:
    """Refuses ``--overlap-grad-reduce`` where some parameters may get no gradient.

    Megatron reduces a bucket once each of its parameters has a gradient.

    Raises:
        ScheduleError: values, or chance, decide whether parameters get one, and ``--overlap-grad-reduce`` is on.
    """
    if not overlap_grad_reduce:
        return
    remedy = "leave out --overlap-grad-reduce"
    if reach.perhaps:
        what = "not every batch reaches it (the code chooses by values), and its gradients would be waited for"
        raise ScheduleError(Problem(what, reach.perhaps[0], remedy=remedy))
    if structure is not None and structure.by_chance:
        what = "layers may be skipped by chance (layerdrop), and their gradients would be waited for"
        raise ScheduleError(Problem(what, structure.layers, remedy=remedy))


def watch_unreached(definition: nn.Module, uncalled: Collection[str]) -> None:
    """Watches modules with parameters that no trial has called, and that are therefore not trained.

    A batch may call them for indices alone. A gradient that comes back through their output raises ConfigError.
    """
    for path, module in definition.named_modules():
        if path in uncalled and next(module.parameters(recurse=False), None) is not None:
            module.register_forward_hook(_refuse_gradients(path))


def _refuse_gradients(path: str) -> Any:
    def refuse(gradient: torch.Tensor) -> None:
        raise ConfigError(
            f"{path}: the loss of this batch depends on it, that of no trial of the definition did, so that its "
            "parameters are not trained. Its forward must use it for every batch, or for none"
        )

    def watched(module: nn.Module, args: Any, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return output
        probe = torch.zeros((), requires_grad=True)
        probe.register_hook(refuse)
        return torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda t: t + probe.to(t.device, t.dtype) if t.is_floating_point() else t, output
        )

    return watched
