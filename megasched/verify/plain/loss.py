"""Computes the loss that a class of transformers gives by itself, and finds the labels that it wants."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

IGNORED = -100  # a label that does not count, to torch's cross entropy and so to Hugging Face


class Labels(NamedTuple):
    """Describes the labels that a class takes.

    Attributes:
        moved: whether it takes the ids themselves and moves them by one, as most that predict the next token do;
            BART's and BERT's decoders want them moved.
        skipped: number of first positions that have no label.
        shifted: whether it needs ``shift_labels``, too: labels that are moved already.
    """

    moved: bool
    skipped: int = 0
    shifted: bool = False


def loss_of(
    model: Any, inputs: Mapping[str, torch.Tensor], labels: torch.Tensor, takes: Labels
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the class's own loss and its logits; takes cross entropy only where its forward gives no loss.

    Args:
        inputs: arguments of the forward, e.g. ``input_ids`` [b, s].
        labels: [b, s] (or [b]), what belongs at its position; none at the last one where the class moves them.
        takes: what ``labels_of`` says of the class, or that it takes labels as they are.
    """
    own = torch.cat([inputs["input_ids"][:, :1], labels[:, :-1]], dim=1) if takes.moved else labels
    own = own[:, takes.skipped :] if takes.skipped else own
    more = {"shift_labels": labels.contiguous()} if takes.shifted else {}
    output = model(**inputs, labels=own.contiguous(), **more)
    if isinstance(output, tuple):
        return output[0], output[1]
    logits = output["logits"]
    loss = output.get("loss")
    if loss is None:
        wide = torch.promote_types(logits.dtype, torch.float32)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2).to(wide), labels.flatten())
    return loss, logits


def labels_of(model: Any, tokens: torch.Tensor) -> Labels:
    """Finds out which labels the class takes, by the position at which it looks for a single label.

    The label of the last position must not count then, for a class that moves them does not look there.
    """
    training = model.training
    model.eval()
    with torch.no_grad():
        if _needs_shifted(model, tokens[:1]):
            model.train(training)
            return Labels(moved=True, shifted=True)
        skipped = _skipped(model, tokens[:1])
        place, row = (tokens.shape[1] + skipped) // 2, tokens[:1]
        loss, logits = _loss_of_one(model, row, place, int(row[0, place]), skipped)
        wanted = torch.log_softmax(logits[0, place - 1 : place + 1].float(), dim=-1)[:, row[0, place]]
        before, at = (abs(float(loss) + float(one)) for one in wanted)
        found = not at < 1e-3 < before
        if min(before, at) >= 1e-3:  # no cross entropy, or of several places
            found = _looks_before(model, row, place, logits.shape[-1], skipped)
    model.train(training)
    return Labels(found, skipped)


def _needs_shifted(model: Any, row: torch.Tensor) -> bool:
    """Returns whether the class fails without ``shift_labels``, and not with them."""
    for takes in (Labels(moved=True), Labels(moved=True, shifted=True)):
        try:
            loss_of(model, {"input_ids": row}, row, takes)
        except (AttributeError, TypeError):  # of what is None, or of an argument that it does not have
            continue
        except ValueError:  # of the number of labels
            return False
        return takes.shifted
    return False


def _skipped(model: Any, row: torch.Tensor) -> int:
    """Returns how many of the first positions take no labels: none, but where the class fails with those.

    Raises:
        ValueError: it fails with any number of them.
    """
    why = None
    for skipped in range(max(1, row.shape[1] - 3)):
        try:
            model(input_ids=row, labels=row[:, skipped:])
        except ValueError as error:  # torch's, of another number of labels than of logits
            why = why or error
            continue
        return skipped
    words = "the class gives no loss for one text, however many of its first positions have no label"
    raise ValueError(f"{words}: {why}") from why


def _looks_before(model: Any, row: torch.Tensor, place: int, classes: int, skipped: int) -> bool:
    """Returns whether the token at a position has no part in the effect of its label.

    In a causal model that is so where earlier positions alone are to predict the label.
    """
    one = partial(_loss_of_one, model, place=place, skipped=skipped)
    changed = row.clone()
    changed[0, place] = (row[0, place] + classes // 2) % classes
    here, there = (
        float(one(tokens, label=1)[0] - one(tokens, label=classes // 2)[0]) for tokens in (row, changed)
    )
    return abs(here - there) <= 1e-3 * abs(here)


def _loss_of_one(
    model: Any, row: torch.Tensor, place: int, label: int, skipped: int
) -> tuple[torch.Tensor, torch.Tensor]:
    takes, labels, inputs = Labels(False, skipped), torch.full_like(row, IGNORED), {"input_ids": row}
    labels[0, place] = label
    try:
        return loss_of(model, inputs, labels, takes)
    except (IndexError, RuntimeError):  # it takes labels for ids, whatever they are
        labels = row.clone()
        labels[0, place] = label
        return loss_of(model, inputs, labels, takes)
