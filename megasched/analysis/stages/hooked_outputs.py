"""Finds the tensors that HF's forward hooks record inside of layers, such as router logits for an auxiliary loss.

HF registers these hooks on the modules that a class names (``_can_record_outputs``), once a run asks for their
outputs (``output_router_logits``). The module around the layers then returns these, in the order of the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from megasched.analysis.recording.meta_call import tensors_in
from megasched.analysis.recording.trees import leaves_of
from megasched.analysis.stages.output_refs import OutputRef
from megasched.errors import MegaschedError

# Where a leaf stands in what a module returns: keys and indices, as ``tree_map_with_path`` gives them.
LeafPath = tuple[Any, ...]


def find_recorded(
    model: nn.Module,
    calls: Iterable[tuple[str, Any]],
    inside: Callable[[str], bool],
    around: Callable[[str], bool],
) -> tuple[OutputRef, ...]:
    """Returns the places of the tensors that hooks recorded in one run, in the order in which they were made.

    Args:
        model: the model that ran; HF's hooks are on it now.
        calls: path and output of every module call.
        inside: whether the module at a path lies in a layer, and is not a layer itself.
        around: whether the module at a path holds the layers.
    """
    calls = list(calls)
    collected = {id(tensor) for path, output in calls if around(path) for tensor in tensors_in(output)}
    return tuple(
        OutputRef(path, index)
        for path, output in calls
        if inside(path) and model.get_submodule(path)._forward_hooks
        for index, tensor in leaves_of(output)
        if id(tensor) in collected
    )


def change_leaves(
    path: str, output: Any, changes: Mapping[LeafPath, Callable[[torch.Tensor], torch.Tensor]]
) -> Any:
    """Returns the output of the module at ``path`` with some of its leaves changed.

    Raises:
        MegaschedError: the output has no such leaf.
    """
    missing = set(changes)

    def change(leaf_path: LeafPath, leaf: Any) -> Any:
        if leaf_path not in changes:
            return leaf
        missing.discard(leaf_path)
        return changes[leaf_path](leaf)

    changed = torch.utils._pytree.tree_map_with_path(change, output)
    if missing:
        names = ", ".join(sorted(map(torch.utils._pytree.keystr, missing)))
        raise MegaschedError(
            f"{path} returns no {names}, which HF's hooks recorded inside of its layers in the trial call. "
            "Run it with output_router_logits=false"
        )
    return changed
