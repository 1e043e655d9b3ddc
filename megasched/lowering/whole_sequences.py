"""Has a model that is built under context parallelism take whole sequences, and return whole logits.

In between each rank runs its part of the sequence, so the loop around the model stays as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from megasched.analysis.cp.packed_sequences import one_sequence_a_row
from megasched.analysis.recording.meta_call import meta_copy
from megasched.analysis.stages.layer_stack import LayerStack
from megasched.analysis.trials.reach import find_reach
from megasched.definition.mask_interface import context_masks
from megasched.errors import ConfigError, Problem, ScheduleError
from megasched.language.parallel_dims import ParallelDims
from megasched.language.tensor_types import ShardDim
from megasched.layers.context_parallel import CpGroup
from megasched.layers.wrap import Forward, wrap_forward
from megasched.plan.plan import Plan

_SEQUENCE = ShardDim(1)  # of token ids, labels and logits
# Arguments of each token: those of which a rank's forward sees its part, and with what its loss takes whole. What
# else is a tensor can't be split.
_SPLIT = ("input_ids", "attention_mask", "position_ids")
_OF_TOKENS = (*_SPLIT, "labels", "shift_labels")
# Arguments by which a causal model returns, or goes on from, what is not split.
_OF_MORE = ("past_key_values", "use_cache", "logits_to_keep", "output_attentions", "output_hidden_states")


def one_sequence_rows(layout: ParallelDims) -> AbstractContextManager[None]:
    """Returns the context in which a definition is planned: under context parallelism a row is one sequence."""
    return one_sequence_a_row() if layout.cp > 1 else nullcontext()


def refuse_uneven_gradients(model: nn.Module, structure: LayerStack | None) -> None:
    """Refuses a model some of whose parameters may get a gradient on one rank and none on another.

    The ranks sum each gradient as it comes, and would wait for one that does not.

    Raises:
        ScheduleError: values, or chance, decide whether a parameter gets one.
    """
    assert structure is not None
    remedy = "train it through Megatron's trainer, or without CP"
    perhaps = find_reach(meta_copy(model), structure.trial_inputs(), with_loss=False).perhaps
    if perhaps:
        what = "context parallelism: whether it gets a gradient goes by values, of which each rank has others"
        raise ScheduleError(Problem(what, perhaps[0], remedy=remedy))
    if structure.by_chance:
        what = "context parallelism: layers may be skipped by chance (layerdrop), and each rank draws for itself"
        raise ScheduleError(Problem(what, structure.layers, remedy=remedy))


class SplitSequences:
    """Has a definition run on this rank's part of whole sequences.

    Args:
        plan: of context parallelism.
        ranks: those that share a sequence.
    """

    def __init__(self, plan: Plan, ranks: CpGroup) -> None:
        assert plan.cp_facts is not None
        self._takes_positions = plan.cp_facts.takes_positions
        self._ranks = ranks

    def ids(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part [b, s / cp] of token ids [b, s].

        Raises:
            ConfigError: the length does not divide.
        """
        pieces, length = 2 * self._ranks.zigzag.size, whole.shape[1]
        if length % pieces:
            raise ConfigError(
                f"context parallelism cuts each sequence into {pieces} equal pieces, and here are {length} "
                f"tokens: pad them, tokenizer(..., pad_to_multiple_of={pieces})"
            )
        return self._ranks.zigzag.local_sequence(whole, _SEQUENCE)

    def positions(self, batch: int, length: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Returns the argument with the positions [b, s / cp] of a part, if the definition takes them."""
        if not self._takes_positions:
            return {}
        return {"position_ids": self._ranks.zigzag.positions(length, device).expand(batch, length).contiguous()}

    @contextmanager
    def running(self, batch: int) -> Iterator[None]:
        """Runs its body, a call of the definition with a part of so many sequences."""
        self._ranks.batch = batch
        # transformers takes a jump in positions for the next sequence of a row.
        with one_sequence_a_row(), context_masks(self._ranks.zigzag, self._ranks.gather):
            yield

    def logits(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the logits [b, s, v] of whole sequences, on each rank; it takes its part of their gradient."""
        return self._ranks.gather_result(part, _SEQUENCE)


def take_whole_sequences(model: nn.Module, plan: Plan, ranks: CpGroup) -> None:
    """Wraps the forward and the loss of a causal language model, in place.

    Every rank is given the same token ids and labels, both [b, s], and returns the same logits [b, s, v] and the
    same loss. A gradient is that of the rank's own part until it is summed (``partial_gradients.py``).
    """
    own: Any = model
    signature, calls_loss = inspect.signature(model.forward), plan.stack.calls_loss
    sequences = SplitSequences(plan, ranks)
    gathered = _Logits(sequences)
    if calls_loss:
        own.loss_function = gathered.before(own.loss_function)

    def run(forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        given = _by_name(signature, args, kwargs)
        if not calls_loss and "labels" in given:
            raise ConfigError(
                f"labels: {type(model).__name__} computes its loss by code of its own, which would see a part "
                "of the sequence: leave them out, and compute the loss of output.logits"
            )
        _refuse_other_sequences(given)
        ids = sequences.ids(given["input_ids"])
        given = {name: value for name, value in given.items() if name not in _SPLIT}
        given |= sequences.positions(*ids.shape, ids.device)
        with sequences.running(len(ids)):
            output = forward(input_ids=ids, **given, use_cache=False)
        return _of_whole(output, gathered)

    wrap_forward(model, run)


class _Logits:
    """Gathers the logits of a call once, for its loss and for its output."""

    def __init__(self, sequences: SplitSequences) -> None:
        self._sequences = sequences
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None  # a rank's part, and the whole

    def before(self, loss_function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Returns the loss function, called with whole logits."""

        def of_whole(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            whole = self._sequences.logits(logits)
            self._last = logits, whole
            return loss_function(whole, *args, **kwargs)

        return of_whole

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        last, self._last = self._last, None
        return last[1] if last is not None and last[0] is part else self._sequences.logits(part)


def _of_whole(output: Any, gathered: _Logits) -> Any:
    """Returns the output of a call with whole logits, and without what is of a rank's part, such as hidden states.

    Raises:
        ConfigError: the outputs have no names.
    """
    if not isinstance(output, dict):
        what = f"a call returned a {type(output).__name__}, and context parallelism gathers the logits of a"
        raise ConfigError(f"{what} ModelOutput: leave return_dict=False out of the call and of model.config")
    whole = {name: value for name, value in output.items() if isinstance(value, torch.Tensor) and not value.dim()}
    return type(output)(**whole | {"logits": gathered.whole(output["logits"])})


def _by_name(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call that are not None.

    Raises:
        ConfigError: one can't be split, or asks for what is not gathered.
    """
    bound = signature.bind(*args, **kwargs)
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        catches_all = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        found |= value if catches_all else {name: value}
    found = {name: value for name, value in found.items() if value is not None}
    tensors = (name for name, value in found.items() if isinstance(value, torch.Tensor) and value.dim())
    unknown = [name for name in tensors if name not in _OF_TOKENS]
    unknown += [name for name in _OF_MORE if found.get(name)]
    if unknown or "input_ids" not in found:
        what = f"{unknown[0]} can't be used" if unknown else "input_ids is missing"
        raise ConfigError(f"{what} under context parallelism, which splits {', '.join(_OF_TOKENS)} [b, s]")
    found.pop("use_cache", None)
    return found


def _refuse_other_sequences(given: Mapping[str, Any]) -> None:
    """Raises ConfigError for rows that are not one sequence from their first token on."""
    ids, mask, positions = given["input_ids"], given.get("attention_mask"), given.get("position_ids")
    if mask is not None and not bool(mask.all()):
        raise ConfigError(
            "attention_mask: under context parallelism a token attends to all before it. Pad on the right, leave "
            "the mask out, and give padding the label -100"
        )
    counted = torch.arange(ids.shape[1], device=ids.device)
    if positions is not None and not torch.equal(positions, counted.expand(positions.shape)):
        raise ConfigError(
            "position_ids: context parallelism takes one sequence a row, with positions 0, 1, 2, ...: leave them "
            "out"
        )
