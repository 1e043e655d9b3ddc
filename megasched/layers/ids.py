"""Ids of tokens that a vocabulary does not have.

An embedding that is cut over TP gives zeros for an id that no rank has: the run would train on, on other numbers.
"""

from __future__ import annotations

import torch

from megasched.errors import ConfigError


def refuse_ids(name: str, ids: torch.Tensor, vocabulary: int, *, below_zero: bool) -> None:
    """Ends a run whose batch has an id that is none of the vocabulary.

    On a GPU nothing waits for the answer: the device stops the run at its next kernel, and prints the words.

    Args:
        name: of the tensor, for messages.
        ids: of any shape.
        below_zero: such ids are wrong as well; labels may have them, where HF's loss passes over a position.

    Raises:
        ConfigError: on a CPU, with the id and where it stands in the batch.
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
