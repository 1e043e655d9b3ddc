"""Distributes experts over the EP group: each rank holds some, and pairs of token and expert travel to their rank.

HF's router decides, HF's experts compute, and Megatron's all-to-all collectives transfer. Megatron's own
``MoEAlltoAllTokenDispatcher`` takes a map [tokens, experts] instead of the routing (megatron/core/transformer/moe/
token_dispatcher.py), which loses the order of a token's experts and adds its results up in another order; this
module keeps every pair separate until it is back, and sums a token's pairs in HF's order. Each of batched experts
gets all tokens, which travel to all ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    all_to_all,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import nn
from torch.nn import functional as F

from megasched.definition.expert_trials import first_beyond, returned, weighted_pairs
from megasched.definition.experts import expert_count, is_batched
from megasched.language.tensor_types import INVARIANT, REPLICATE, TpType
from megasched.layers.build_context import BuildContext
from megasched.layers.fused.pairs import by_expert, in_order
from megasched.layers.linear import make_parameter
from megasched.layers.wrap import Forward, wrap_forward

# Maps tokens [t, h], their experts [t, k] and the weights of these [t, k] to [t, h]; of batched experts, each
# token's rows [t, experts * h] to the same shape.
Experts = Callable[..., torch.Tensor]


def lower_experts(path: str, module: nn.Module, context: BuildContext) -> None:
    """Leaves a module of experts with those of this EP rank, and makes it exchange pairs with the other ranks.

    See ``megasched.definition.experts`` for such modules. The experts' gradients are complete once they are summed
    over the ranks that hold the same experts; ``allreduce = False`` tells Megatron's DDP and optimizers so.
    """
    group, plan = context.expert_group, context.plan
    total, batched = expert_count(module), is_batched(module)
    for name, held in list(module.named_parameters(recurse=False)):
        parameter = make_parameter(module, name, plan.placement(path, name), held, context)
        parameter.allreduce = False
    if hasattr(module, "num_experts"):
        module.num_experts = total // group.size()  # type: ignore[assignment]
    spare = first_beyond(module, total) if path in plan.returning else None
    exchange = _dispatch_batches if batched else partial(_dispatch, spare=spare)
    # Where the TP ranks have the same tokens, each sends its share of them: each pair is computed once.
    tp_type = plan.tp_facts.experts.get(path, INVARIANT)
    same = context.size > 1 and tp_type in (INVARIANT, REPLICATE)
    signature = inspect.signature(type(module).forward)

    def dispatched(forward: Forward, /, *args: Any, **kwargs: Any) -> torch.Tensor:
        dispatch = partial(exchange, forward, total, group)
        if same:
            dispatch = partial(_share_tokens, dispatch, tp_type, context.group)
        hidden, *routing = list(signature.bind(module, *args, **kwargs).arguments.values())[1:]
        if batched:
            tokens = hidden.unflatten(0, (total, -1)).transpose(0, 1)
            return dispatch(tokens.flatten(1)).view_as(tokens).transpose(0, 1).reshape(hidden.shape)
        flat = (x.reshape(-1, x.shape[-1]) for x in (hidden, *routing))
        return dispatch(*flat).view_as(hidden)

    wrap_forward(module, dispatched, node="experts")


@dataclass(frozen=True)
class Exchange:
    """Holds the numbers of pairs that this rank sends to each EP rank and receives from it."""

    group: Any
    sent: list[int]
    received: list[int]

    def there(self, x: torch.Tensor) -> torch.Tensor:
        """Sends rows, sorted by destination rank, to the ranks of their experts; the gradient comes back."""
        return all_to_all(self.group, x, self.received, self.sent)

    def back(self, x: torch.Tensor) -> torch.Tensor:
        """Sends rows of results back to the ranks of their tokens."""
        return all_to_all(self.group, x, self.sent, self.received)


def _dispatch(
    experts: Experts,
    total: int,
    group: Any,
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    *,
    spare: int | None = None,
) -> torch.Tensor:
    """Returns the output of all experts for this rank's tokens.

    Args:
        experts: the definition's forward, of this rank's experts alone.
        total: number of experts of all EP ranks.
        hidden: [t, h].
        index: [t, k], the experts of each token; numbers from ``total`` on are not sent anywhere.
        weights: [t, k].
        spare: where such numbers add the weighted token itself, one of them to the definition's forward; None
            where they add nothing.

    Returns:
        [t, h], each token the sum of its weighted results.
    """
    exchange, local = routed(index.flatten(), total, group)
    order, sent = by_expert(index, total)[1], sum(exchange.sent)  # ranks hold consecutive experts
    pairs = in_order(order, index, sent)
    states = exchange.there(pairs.spread(hidden))
    shares = exchange.there(weights.flatten().gather(0, order[:sent]))
    results = _compute(experts, states, local, shares, spare)
    summed = pairs.collect(exchange.back(results))
    if spare is not None:
        summed = summed + returned(hidden, index, weights, total)
    return summed.to(hidden.dtype)


def _dispatch_batches(experts: Experts, total: int, group: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the output of all batched experts for this rank's tokens.

    Args:
        experts: the definition's forward, of this rank's experts alone; it takes rows [experts * t, h].
        total: number of experts of all EP ranks.
        tokens: [t, total * h], each token's row for each expert.

    Returns:
        [t, total * h].
    """
    size, count = group.size(), tokens.shape[0]
    counts = tokens_of_ranks(count, group, tokens.device)
    exchange = Exchange(group, [count] * size, counts)
    to_ranks = tokens.view(count, size, -1).transpose(0, 1).flatten(0, 1)  # ranks hold consecutive experts
    rows = exchange.there(to_ranks).view(sum(counts), total // size, -1).transpose(0, 1)
    results = experts(rows.flatten(0, 1)).view_as(rows).transpose(0, 1).flatten(1)
    return exchange.back(results).view(size, count, -1).transpose(0, 1).flatten(1)


def tokens_of_ranks(count: int, group: Any, device: torch.device) -> list[int]:
    """Returns how many tokens each EP rank has; ranks may have batches of other sizes."""
    counts = torch.full((group.size(),), count, device=device)
    received = torch.empty_like(counts)
    torch.distributed.all_to_all_single(received, counts, group=group)
    return received.tolist()


def as_many_tokens(count: int, group: Any, device: torch.device) -> list[int]:
    """Returns the same for tensors without values, as if all ranks had as many."""
    return [count] * group.size()


def routed(chosen: torch.Tensor, total: int, group: Any) -> tuple[Exchange, torch.Tensor]:
    """Returns how many pairs go where, and the local expert of each pair that this rank receives.

    Args:
        chosen: the experts of this rank's pairs; pairs without an expert are not sent.
    """
    size = group.size()
    # What the host reads it waits for, as `bincount` does, and `repeat_interleave` of a size that it isn't told.
    found = chosen.new_zeros(total + 1).scatter_add_(0, chosen.clamp(max=total), torch.ones_like(chosen))
    counts = found[:total].view(size, -1)
    received = torch.empty_like(counts)
    torch.distributed.all_to_all_single(received, counts, group=group)  # [EP, experts of this rank]
    exchange = Exchange(group, *torch.stack([counts.sum(1), received.sum(1)]).tolist())
    local = torch.arange(counts.shape[1], device=chosen.device).repeat(size)
    return exchange, local.repeat_interleave(received.flatten(), output_size=sum(exchange.received))


def routed_evenly(chosen: torch.Tensor, total: int, group: Any) -> tuple[Exchange, torch.Tensor]:
    """Returns the same for tensors without values, as if every expert got equally many pairs."""
    ranks = group.size()
    sent = [(chosen.numel() + rank) // ranks for rank in range(ranks)]
    local = torch.arange(chosen.numel(), device=chosen.device) % (total // ranks)
    return Exchange(group, sent, sent), local


def _compute(
    experts: Experts, states: torch.Tensor, index: torch.Tensor, shares: torch.Tensor, spare: int | None
) -> torch.Tensor:
    """Returns the weighted results of pairs [p, h].

    If there are none, one pair of weight zero keeps the parameters in the graph: Megatron's overlapped reduction
    waits for the gradient of each.
    """
    none = states.shape[0] == 0
    if none:
        states, index, shares = (F.pad(states, (0, 0, 0, 1)), F.pad(index, (0, 1)), F.pad(shares, (0, 1)))
    results = weighted_pairs(experts, states, index, shares, spare)
    return results[:0] if none else results


def _share_tokens(
    dispatch: Experts,
    tp_type: TpType,
    group: Any,
    hidden: torch.Tensor,
    *routing: torch.Tensor,
) -> torch.Tensor:
    """Runs ``dispatch`` on this TP rank's share of tokens that all TP ranks have, and gathers the results.

    Args:
        region: ``R``: all ranks have the whole gradient of the results, and need the whole gradient of the tokens;
            ``P``: each has a part of both.
    """
    tokens, size = hidden.shape[0], group.size()
    padded = [F.pad(x, (0, 0, 0, -tokens % size)) for x in (hidden, *routing)]
    if tp_type == INVARIANT:
        own = [scatter_to_sequence_parallel_region(x, group=group) for x in padded]
    else:
        own = [x.chunk(size)[group.rank()] for x in padded]
    results = dispatch(*own)
    partial_gradient = tp_type == REPLICATE
    return gather_from_sequence_parallel_region(
        results, tensor_parallel_output_grad=partial_gradient, group=group
    )[:tokens]
