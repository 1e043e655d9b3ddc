"""Tells apart runs whose gradient buffers hold other parameters, or hold them in other places.

Unless it is ``fully_reshardable``, the distributed optimizer writes its states as the buffers lie, under no names
(``sharded_param_state_dp_reshardable`` in megatron/core/optimizer/distrib_optimizer.py): a run with another
schedule gets the states of other parameters, wherever sizes agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from operator import itemgetter
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import unwrap_model

from megasched.plan.param_mapping import ParamMapping


def digest_of(models: Sequence[Any]) -> str | None:
    """Returns a digest of what lies where in the gradient buffers of all ranks; on all ranks together.

    It is the same at any DP size that makes the same buckets. None where there are no gradients: with
    ``--skip-train`` Megatron does not wrap its models in DistributedDataParallel (``training.py:2035``).

    Args:
        models: the chunks of this rank, as Megatron wraps them.
    """
    if not all(isinstance(model, DistributedDataParallel) for model in models):
        return None
    pp = parallel_state.get_pipeline_model_parallel_rank()
    tp, ep = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_expert_model_parallel_rank()
    others = _hash([_places(model, model.buffers) for model in models])
    experts = _hash([_places(model, model.expert_parallel_buffers) for model in models])
    held = {("tp", pp, tp): others, ("ep", pp, ep): experts}
    of_all: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(of_all, held)
    return _hash(sorted({item for of_rank in of_all for item in of_rank.items()}))


def _places(model: Any, buffers: Sequence[Any]) -> list[Any]:
    """Returns, for each bucket, each parameter's start and end in it and what it is made of."""
    local = unwrap_model(model).local_parameters().values()
    made_of = {id(parameter): _described(assembly) for parameter, assembly in local}
    return [
        sorted(
            ((*place, made_of[id(parameter)]) for parameter, place in bucket.param_to_index.items()),
            key=itemgetter(0),
        )
        for buffer in buffers
        for bucket in buffer.buckets
    ]


def _described(assembly: ParamMapping) -> Sequence[Any]:
    """Returns what decides the order of numbers in a parameter.

    Checkpoints have a digest of it: a field that is added here makes those of before look like others.
    """
    parts = [
        (part.name, *part.shape, part.axis, *part.components, part.padded, part.transposed, part.group)
        for part in assembly.parts
    ]
    return parts, assembly.groups, assembly.paired, assembly.entry, assembly.transposed, assembly.interleaved


def _hash(value: Any) -> str:
    return sha256(repr(value).encode()).hexdigest()
