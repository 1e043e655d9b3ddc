"""Decides what code that runs in the backward pass alone (``recording/backward_code.py``) means for labels."""

from __future__ import annotations

from typing import Any

import torch

from megasched.analysis.recording.backward_code import Function
from megasched.analysis.recording.meta_call import tensors_in
from megasched.analysis.recording.operators import LibraryOperator
from megasched.analysis.rules.op_rules import op_rule
from megasched.analysis.tp.operations import LabelRun
from megasched.language.tensor_types import FEATURE_SHARD, INVARIANT, REPLICATE, SEQUENCE_SHARD


class BackwardLabels(LabelRun):
    """Extends a labelled run by functions with their own backward and by hooks."""

    def custom_function(self, function: Function, args: tuple[Any, ...], output: Any) -> None:
        """Asks to gather the columns of a function's outputs if its own backward can't work on shards.

        For split or regional tensors it asks for the whole sequence, or reports a problem.
        """
        labels = [self.label(tensor) for tensor in tensors_in(output)]
        types = {label.type for label in labels} - {INVARIANT}
        if self.silent or not types:
            return
        if types == {FEATURE_SHARD} and isinstance(function, LibraryOperator) and op_rule(function.operator):
            return
        followed = all(label.along is not None for label in labels) or types == {REPLICATE}
        if followed and self.functions.works_on_shards(function, args, output, lambda t: self.label(t).along):
            return
        if FEATURE_SHARD in types:
            columns = frozenset[str]().union(*(label.columns for label in labels))
            self._gather(columns, f"the backward of {function.__name__} does not work on a part")
        if SEQUENCE_SHARD in types:
            self._need_sequence()
        if REPLICATE in types:
            self._problem(
                f"the backward of {function.__name__} does not take a part of a gradient",
                "leave the linears around it whole",
            )

    def packs(self, change: int) -> None:
        """Counts how many of the definition's own hooks on tensors saved for the backward pass are active."""
        self.packing += change

    def grad_fn_read(self, tensor: torch.Tensor) -> None:
        if not self.silent:
            self.hooked(tensor)

    def hook_registered(self, tensor: torch.Tensor, hook: Any) -> None:
        self.hooked(tensor)

    def hooked(self, tensor: torch.Tensor) -> None:
        """Asks to gather the columns of a tensor whose gradient a hook sees, as it must be whole on each rank."""
        label = self.label(tensor)
        self._gather(label.columns, "a hook looks at its gradient")
        self._use(tensor)  # nobody takes it over further up, where its gradient would not be summed yet
        if label.type in (SEQUENCE_SHARD, REPLICATE) or label.params:
            self._problem(
                "a hook is handed a gradient of which each rank has a part",
                "switch sequence parallelism off, or leave the linears around it whole",
            )
