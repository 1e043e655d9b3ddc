"""Shards embeddings: along the vocabulary by Megatron's ``VocabParallelEmbedding``, or along the features.

HF subclasses ``nn.Embedding`` to scale or normalise rows; such a subclass keeps its forward, and only its lookup
is Megatron's.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import VocabParallelEmbedding, set_tensor_model_parallel_attributes
from torch import nn

from megasched.errors import ConfigError
from megasched.layers.build_context import BuildContext
from megasched.layers.linear import make_parameter
from megasched.layers.wrap import takes_any_name


class VocabEmbedding(VocabParallelEmbedding):
    """Looks up like ``VocabParallelEmbedding``, but gives the padding id no gradient, as ``nn.Embedding`` does."""

    padding_idx: int | None = None
    overwritten: bool = False  # the definition changes what is looked up in place
    checked: tuple[str, int] | None = None  # name and vocabulary of ids that nobody else checks

    @takes_any_name
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Maps ids [b, s] int64 to [b, s, h], the same on all TP ranks."""
        return _lookup(self, ids)


class ShardedLookup(nn.Embedding):
    """Replaces the base class of an HF subclass of ``nn.Embedding``: ``super().forward`` looks up in a shard."""

    overwritten: bool = False
    checked: tuple[str, int] | None = None

    @takes_any_name
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return _lookup(self, ids)


def _lookup(module: Any, ids: torch.Tensor) -> torch.Tensor:
    if module.checked is not None:
        name, vocabulary = module.checked
        refuse_ids(name, ids, vocabulary, below_zero=True)
    found = VocabParallelEmbedding.forward(module, ids)
    if module.overwritten:  # autograd allows it of no view that a custom function made
        found = found.clone()
    if module.padding_idx is None:
        return found
    return torch.where((ids == module.padding_idx).unsqueeze(-1), found.detach(), found)


def lower_features(path: str, module: nn.Embedding, context: BuildContext) -> nn.Module:
    """Returns an embedding with this rank's columns of a table, filled with its values.

    It maps ids [...] to [..., features / tp] without communication.
    """
    held = module.weight
    parallel = nn.Embedding(1, 1, device="meta")
    weight = make_parameter(parallel, "weight", context.plan.placement(path, "weight"), held, context)
    set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=1, stride=1)  # Megatron's norm counts by it
    parallel.num_embeddings, parallel.embedding_dim = weight.shape
    parallel.padding_idx = module.padding_idx
    return parallel


def lower_embedding(path: str, module: nn.Embedding, context: BuildContext) -> nn.Module:
    """Returns the vocabulary-parallel embedding that replaces an HF one, filled with its values."""
    placement = context.plan.placement(path, "weight")
    held = module.weight
    dtype = context.dtype(placement, held)
    with context.making(held):
        parallel = VocabEmbedding(
            placement.padded or module.num_embeddings,
            module.embedding_dim,
            init_method=nn.init.zeros_,
            config=context.config_with(params_dtype=dtype),
            tp_group=context.group,
        )
    parallel.padding_idx = module.padding_idx
    parallel.overwritten = path in context.plan.tp_facts.overwritten
    if not context.megatron_finalizes:  # the trainer checks a batch as it comes
        parallel.checked = f"the ids of {path}", placement.shape[0]
    context.fill_or_tie(parallel, "weight", placement, held)
    if type(module) is nn.Embedding:
        return parallel
    cls = type(module)
    module.__class__ = type(f"VocabParallel{cls.__name__}", (cls, ShardedLookup), {"__module__": cls.__module__})
    module.weight = parallel.weight
    for name, value in parallel.__dict__.items():
        if not name.startswith("_") and name not in ("training", "padding_idx"):
            module.__dict__[name] = value
    return module


def refuse_ids(name: str, ids: torch.Tensor, vocabulary: int, *, below_zero: bool) -> None:
    """Stops a run whose batch has an id outside the vocabulary.

    An embedding that is sharded over TP returns zeros for an id that no rank has: the run would silently train on
    them. On a GPU nothing waits for the result: the device stops the run at its next kernel, and prints the
    message.

    Args:
        name: of the tensor, for messages.
        ids: of any shape.
        below_zero: negative ids are wrong as well; labels may have them, where HF's loss skips a position.

    Raises:
        ConfigError: on a CPU, with the id and its position in the batch.
    """
    if ids.device.type == "meta" or not ids.numel():
        return
    wrong = (ids >= vocabulary) | (ids < 0) if below_zero else ids >= vocabulary
    what = f"{name} of this batch: an id is none of the vocabulary, which ends with {vocabulary - 1}"
    if ids.device.type != "cpu":
        torch._assert_async(~wrong.any(), f"megasched: {what}")
    elif wrong.any():
        place = [int(number) for number in wrong.nonzero()[0]]
        raise ConfigError(f"{what}; {int(ids[tuple(place)])} at {place}: the data are of another tokenizer")
