"""Fixes ``fully_reshardable`` checkpoints of a distributed optimizer with gradients in several buckets.

Each bucket ends with padding, up to a multiple of the DP size. The states of the DP ranks are put together
without that padding, but megatron-core 0.19 cuts parameters out of them at their places in the buffer, which has
it: all parameters past the first padded bucket are written with the states of others, or with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from megasched.attributes import Undo, resolve, wrap_attribute
from megasched.errors import ConfigError
from megasched.patches.registry import Patch

_TARGET = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.sharded_param_state_fully_reshardable"


def _change() -> Undo:
    def without_padding(sharded_state: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        with _places_without_padding(self.buffers):
            return sharded_state(self, *args, **kwargs)

    return wrap_attribute(_TARGET, without_padding)


@contextmanager
def _places_without_padding(buffers: list[Any]) -> Iterator[None]:
    """Runs its body with parameters at the places that they have where no bucket ends with padding."""
    before = [buffer.param_index_map for buffer in buffers]
    for buffer in buffers:
        padding = (bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets)
        earlier = list(accumulate(padding, initial=0))
        buffer.param_index_map = {
            param: (start - earlier[bucket], end - earlier[bucket], bucket)
            for param, (start, end, bucket) in buffer.param_index_map.items()
        }
    try:
        yield
    finally:
        for buffer, places in zip(buffers, before, strict=True):
            buffer.param_index_map = places


def _unneeded() -> str | None:
    return "Megatron takes the padding of buckets off" if written_of_a_second_bucket() == 2 else None


def written_of_a_second_bucket() -> float:
    """Returns the value that the installed Megatron writes for a parameter after a padded bucket; 2 is right.

    Raises:
        ConfigError: it does not take the buffers that this version is known to have.
    """
    import torch
    from megatron.core.dist_checkpointing import ShardedTensor

    params = {name: torch.nn.Parameter(torch.zeros(1)) for name in ("first", "second")}
    bucket = SimpleNamespace(grad_data=torch.zeros(2), numel_unpadded=1)
    places = {params["first"]: (0, 1, 0), params["second"]: (2, 3, 1)}
    buffer = SimpleNamespace(buckets=[bucket, bucket], numel_unpadded=2, param_index_map=places)
    gathered = {"param": torch.tensor([1.0, 2.0, 0.0])}  # the third for who reads past the padding
    optimizer = SimpleNamespace(
        buffers=[buffer],
        gbuf_ranges=[{"float32": []}],
        get_parameter_state_dp_zero=lambda **how: [{"float32": gathered}],
    )
    model = {name: ShardedTensor.from_rank_offsets(name, param) for name, param in params.items()}
    try:
        return resolve(_TARGET)(optimizer, model, metadata={})[1]["param"].data.item()
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"can't tell whether this Megatron writes optimizer states right: {_TARGET} failed on two small "
            f"buckets ({type(error).__name__}: {error}). Versions known to work: {PATCH.version_range}"
        ) from error


PATCH = Patch(
    name="bucket_padding",
    targets=(_TARGET,),
    why=(
        "megatron/core/optimizer/distrib_optimizer.py:1790 cuts each parameter's states at its place in the "
        "buffer out of a tensor that :1394 packed without the padding at the end of buckets: with several "
        "(--overlap-grad-reduce, or tied embeddings on two stages) masters and moments come back wrong"
    ),
    change=_change,
    signature={_TARGET: ("model_sharded_state_dict", "is_loading", "metadata")},
    unneeded=_unneeded,
)
