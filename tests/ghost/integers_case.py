"""Whole numbers on a ghost GPU where the host computes them; prints them as JSON (``test_library.py``)."""

from __future__ import annotations

import json

import torch


def found() -> dict[str, object]:
    scores = torch.randn(6, 4, device="cuda").softmax(-1)
    chosen = scores.topk(2).indices
    marks = torch.zeros_like(scores).scatter(1, chosen, 1)
    marks_in_place = torch.zeros_like(scores).scatter_(1, chosen, 1)
    return {
        "positions": (torch.arange(4, device="cuda") * 2).cumsum(0).tolist(),
        "chosen": chosen.tolist(),
        "counted": torch.bincount(chosen.flatten(), minlength=4).tolist(),
        "by marks": marks.long().sum(0).tolist(),
        "by marks in place": marks_in_place.to(torch.int32).sum(0).tolist(),
    }


if __name__ == "__main__":
    print(json.dumps(found()))
