"""How a definition computes its loss, and which labels its code takes."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LossLabels(NamedTuple):
    """The labels that a definition's own code takes.

    Attributes:
        moved: they are the ids themselves, and the code moves them by one; else each is the id that belongs at its
            position.
        ignored: those of ``IGNORED`` do not count, and the loss is the mean over those that do.
        skipped: so many of the first positions have none (those of a picture, which a text has not).
        shifted: it goes by ``shift_labels``, as transformers' functions do that get them: the id that belongs at
            each position, the last one, too. Its ``labels`` are the ids themselves then.
    """

    moved: bool
    ignored: bool
    skipped: int = 0
    shifted: bool = False

    def arguments(self, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Of the forward.

        Args:
            labels: [b, s], the id that belongs at each position; those of images [b] as they are.
        """
        own = torch.cat([labels[:, :1], labels[:, :-1]], dim=1) if self.moved or self.shifted else labels
        own = own[:, self.skipped :] if self.skipped else own
        return {"labels": own.contiguous(), **({"shift_labels": labels.contiguous()} if self.shifted else {})}


class LossForm(NamedTuple):
    """How a definition computes its loss.

    Attributes:
        another: what of it is not the cross entropy of each label; empty where a run computes that in its place.
        labels: what its own code takes, which computes the loss of a run then; None where a run does, or none can.
    """

    another: str = ""
    labels: LossLabels | None = None
