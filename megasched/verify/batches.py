"""Makes the batches that a model is verified on: ids of its whole vocabulary, padding and masked labels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megasched.definition.objectives import CAUSAL_LM, Objective
from megasched.language.parallel_dims import ParallelDims
from megasched.verify.plain.loss import IGNORED
from megasched.verify.plain.runs import Batches

STEPS = 3
MICRO_BATCH = 2
LENGTH = 32  # beyond the windows of small copies, and beyond 16, where tables were cut short
EACH_STEP = 4  # micro-batches of one replica, where a layout asks for no more
_MASK = "attention_mask"  # end of the name of an input that is 0 for padding
# Ids of a text; all others that a config names stand for something else, a picture for instance.
_OF_TEXT = ("pad", "bos", "eos", "sep", "cls", "unk", "decoder_start", "forced")


def make_batches(
    config: Any, layout: ParallelDims, steps: int = STEPS, objective: Objective = CAUSAL_LM, seed: int = 0
) -> Batches:
    """Returns a global batch for each step, with the micro-batches of DP rank 0 first.

    The ids of a micro-batch are spread evenly over the vocabulary; all micro-batches together hold every id of a
    small one. Inputs that are no ids are drawn from the normal distribution. Labels are the next token, and none
    at the last position, where the objective has it so, else any of its classes. Of four micro-batches, one has a
    row that ends in padding, and one ignores a third of its labels.

    Args:
        config: HF config of the model.
        seed: of what is drawn.
    """
    count, length = micro_batches(layout), sequence_length(layout, config, objective)
    draw = torch.Generator().manual_seed(seed)
    shape = objective.shape(config, MICRO_BATCH, length)
    inputs: dict[str, torch.Tensor] = {}
    for name, dtype in objective.inputs.items():
        if not dtype.startswith("int"):
            inputs[name] = torch.randn((steps * count, *shape), generator=draw)
        elif name.endswith(_MASK):
            inputs[name] = torch.ones((steps * count, *shape), dtype=torch.int64)
        else:
            inputs[name] = _tokens(_ids(config), steps * count, length, draw)
    labels = _labels(inputs, config, objective, steps * count, length, draw)
    for place in range(len(labels)):
        if place % 4 == 1 and labels.dim() == 3:
            _pad(inputs, place, length // 2, _padding(config))
            labels[place, 0, length // 2 - objective.predicts_next :] = IGNORED
        elif place % 4 == 2:
            labels[place][..., ::3] = IGNORED
    return Batches({name: _by_step(value, steps) for name, value in inputs.items()}, _by_step(labels, steps))


def _by_step(values: torch.Tensor, steps: int) -> torch.Tensor:
    return values.view(steps, -1, *values.shape[1:])


def _tokens(ids: torch.Tensor, count: int, length: int, draw: torch.Generator) -> torch.Tensor:
    """Returns [count, b, s] of ids; those that a row may lose to padding hold none that stands there alone."""
    size = MICRO_BATCH * length
    groups = -(-len(ids) // size)
    tokens = torch.empty(count, size, dtype=torch.int64)
    for place, row in enumerate(tokens):
        padded = place % 4 == 1  # and what it ends in would be lost to its padding
        own = ids[:0] if padded else ids[(place - (place + 3) // 4) % groups :: groups]
        more = ids[torch.randint(0, len(ids), (max(size - len(own), 0),), generator=draw)]
        row.copy_(torch.cat([own[:size], more])[torch.randperm(size, generator=draw)])
    return tokens.view(count, MICRO_BATCH, length)


def _labels(
    inputs: dict[str, torch.Tensor],
    config: Any,
    objective: Objective,
    count: int,
    length: int,
    draw: torch.Generator,
) -> torch.Tensor:
    if objective.predicts_next:
        tokens = inputs["input_ids"]
        return torch.cat([tokens[..., 1:], torch.full_like(tokens[..., :1], IGNORED)], dim=-1)
    shape = objective.label_shape(config, MICRO_BATCH, length)
    return torch.randint(0, objective.classes(config)[0], (count, *shape), generator=draw)


def _pad(inputs: dict[str, torch.Tensor], place: int, start: int, pad: int) -> None:
    """Ends the first row of a micro-batch in padding, which masks leave out."""
    for name, value in inputs.items():
        value[place, 0, start:] = 0 if name.endswith(_MASK) else pad


def micro_batches(layout: ParallelDims) -> int:
    """Returns how many micro-batches a global batch has; interleaved stages need a multiple of PP per replica."""
    each = max(EACH_STEP // layout.data_parallel_size, 1)
    return layout.data_parallel_size * layout.pp * -(-each // layout.pp)


def sequence_length(layout: ParallelDims, config: Any, objective: Objective) -> int:
    """Returns the shortest length of at least ``LENGTH`` that CP and SP can cut, or what the config fixes."""
    fixed = objective.sequence_length(config)
    if fixed is not None:
        return fixed[0]
    unit = 2 * layout.cp * layout.tp
    return unit * -(-LENGTH // unit)


def flags(layout: ParallelDims, config: Any, objective: Objective) -> list[str]:
    """Returns Megatron's flags for the classes, the sequence length and the batch sizes of a layout."""
    size = MICRO_BATCH * micro_batches(layout)
    classes, length = objective.classes(config)[0], sequence_length(layout, config, objective)
    found = ["--vocab-size", str(classes), "--seq-length", str(length)]
    return [*found, "--micro-batch-size", str(MICRO_BATCH), "--global-batch-size", str(size)]


def _ids(config: Any) -> torch.Tensor:
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


def unreached_windows(config: Any, layout: ParallelDims, objective: Objective = CAUSAL_LM) -> dict[str, int]:
    """Returns the attention windows that no sequence is longer than, so that no check sees them at work."""
    text, length = config.get_text_config(decoder=True), sequence_length(layout, config, objective)
    return {
        name: value
        for name, value in vars(text).items()
        if ("window" in name or name.endswith("chunk_size"))
        and isinstance(value, int)
        and not isinstance(value, bool)
        and value >= length
        and not name.startswith("max_window")
    }
