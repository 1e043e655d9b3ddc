"""Makes the batches that a model is verified on: ids of its whole vocabulary, padding and masked labels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megasched.language.parallel_dims import ParallelDims
from megasched.verify.plain.runs import Batches

STEPS = 3
MICRO_BATCH = 2
LENGTH = 32  # beyond the windows of small copies, and beyond 16, where tables were cut short
EACH_STEP = 4  # micro-batches of one replica, where a layout asks for no more
IGNORED = -100
# Ids of a text; all others that a config names stand for something else, a picture for instance.
_OF_TEXT = ("pad", "bos", "eos", "sep", "cls", "unk", "decoder_start", "forced")


def make_batches(config: Any, layout: ParallelDims, steps: int = STEPS) -> Batches:
    """Returns a global batch for each step, with the micro-batches of DP rank 0 first.

    The ids of a micro-batch are spread evenly over the vocabulary; all micro-batches together hold every id of a
    small one. The last position has no label. Of four micro-batches, one has a row that ends in padding, and one
    ignores a third of its labels.

    Args:
        config: HF config of the model.
    """
    import torch

    count, length = micro_batches(layout), sequence_length(layout)
    ids, pad = _ids(config), _padding(config)
    size = MICRO_BATCH * length
    groups = -(-len(ids) // size)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.empty(steps * count, size, dtype=torch.int64)
    for place, row in enumerate(tokens):
        padded = place % 4 == 1  # and what it ends in would be lost to its padding
        own = ids[:0] if padded else ids[(place - (place + 3) // 4) % groups :: groups]
        more = ids[torch.randint(0, len(ids), (max(size - len(own), 0),), generator=generator)]
        row.copy_(torch.cat([own[:size], more])[torch.randperm(size, generator=generator)])
    tokens = tokens.view(-1, MICRO_BATCH, length)
    labels = torch.cat([tokens[..., 1:], torch.full_like(tokens[..., :1], IGNORED)], dim=-1)
    for place in range(len(tokens)):
        if place % 4 == 1:
            tokens[place, 0, length // 2 :] = pad
            labels[place, 0, length // 2 - 1 :] = IGNORED
        elif place % 4 == 2:
            labels[place][:, ::3] = IGNORED
    shape = (steps, count, MICRO_BATCH, length)
    return Batches(tokens.view(shape), labels.view(shape))


def micro_batches(layout: ParallelDims) -> int:
    """Returns how many micro-batches a global batch has; interleaved stages need a multiple of PP per replica."""
    each = max(EACH_STEP // layout.data_parallel_size, 1)
    return layout.data_parallel_size * layout.pp * -(-each // layout.pp)


def sequence_length(layout: ParallelDims) -> int:
    """Returns the shortest sequence length of at least ``LENGTH`` that CP and SP can cut."""
    unit = 2 * layout.cp * layout.tp
    return unit * -(-LENGTH // unit)


def flags(layout: ParallelDims) -> list[str]:
    """Returns Megatron's flags for the sequence length and the batch sizes of a layout."""
    size = MICRO_BATCH * micro_batches(layout)
    length = str(sequence_length(layout))
    return ["--seq-length", length, "--micro-batch-size", str(MICRO_BATCH), "--global-batch-size", str(size)]


def _ids(config: Any) -> torch.Tensor:
    import torch

    others = {number for name, number in _named_ids(config) if not name.startswith(_OF_TEXT)}
    vocabulary = config.get_text_config(decoder=True).vocab_size
    return torch.tensor([number for number in range(vocabulary) if number not in others])


def _padding(config: Any) -> int:
    """Returns the id that a model pads with; 0 where its config has no valid one, and any id will do."""
    found = getattr(config.get_text_config(decoder=True), "pad_token_id", None)
    vocabulary = config.get_text_config(decoder=True).vocab_size
    return found if isinstance(found, int) and 0 <= found < vocabulary else 0


def _named_ids(config: Any) -> Iterator[tuple[str, int]]:
    """Yields the name and number of each special token of a config and its sub-configs."""
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):
            yield from _named_ids(value)
        elif name.endswith(("_token_id", "_token_index")):
            for number in value if isinstance(value, list | tuple) else [value]:
                if isinstance(number, int) and not isinstance(number, bool):
                    yield name, number


def unreached_windows(config: Any, layout: ParallelDims) -> dict[str, int]:
    """Returns the attention windows that no sequence is longer than, so that no check sees them at work."""
    text, length = config.get_text_config(decoder=True), sequence_length(layout)
    return {
        name: value
        for name, value in vars(text).items()
        if ("window" in name or name.endswith("chunk_size"))
        and isinstance(value, int)
        and not isinstance(value, bool)
        and value >= length
        and not name.startswith("max_window")
    }
