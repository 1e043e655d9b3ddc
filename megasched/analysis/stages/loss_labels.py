"""Defines how a definition computes its loss, and which labels its code takes."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LossLabels(NamedTuple):
    """Describes the labels that a definition's own code takes.

    Attributes:
        moved: whether they are the ids themselves, which the code moves by one; else each is the id that belongs
            at its position.
        ignored: whether labels equal to ``IGNORED`` do not count; the loss is then the mean over the rest.
        skipped: how many of the first positions have no label (those of a picture, which a text has not).
        shifted: whether the loss uses ``shift_labels``, as transformers' functions do that get them: the id that
            belongs at each position, the last one, too. Its ``labels`` are the ids themselves then.
    """

    moved: bool
    ignored: bool
    skipped: int = 0
    shifted: bool = False

    def arguments(self, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the label arguments of the forward.

        Args:
            labels: [b, s], the id that belongs at each position; those of images [b] are passed unchanged.
        """
        own = torch.cat([labels[:, :1], labels[:, :-1]], dim=1) if self.moved or self.shifted else labels
        own = own[:, self.skipped :] if self.skipped else own
        return {"labels": own.contiguous(), **({"shift_labels": labels.contiguous()} if self.shifted else {})}


class LossForm(NamedTuple):
    """Describes how a definition computes its loss.

    Attributes:
        another: how it differs from the cross entropy of each label; empty where a run computes that instead.
        labels: labels of its own code, which then computes the loss of a run; None where a run does, or none can.
    """

    another: str = ""
    labels: LossLabels | None = None
