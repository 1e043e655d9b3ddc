"""What a process sees of ghost CUDA; prints it as JSON (``test_library.py``)."""

from __future__ import annotations

import json

import torch

from tests.ghost.ledger import kernels, recording


def found() -> dict[str, object]:
    with recording() as made:
        x = torch.randn(4, 64, 32, device="cuda", requires_grad=True)
        (x @ x.mT).sum().backward()
    with recording() as moved:
        back = torch.tensor([1, 2, 3]).cuda().cpu().tolist()
    stale = torch.full((3,), 7).cuda()
    del stale
    computed = torch.isnan(torch.randn(3, device="cuda")).tolist()
    with recording() as copied:
        torch.randn(8, device="cuda").sum().item()
    try:
        torch.fft.fft(torch.randn(8, device="cuda"))
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    empty = torch.cuda.memory_allocated()
    held = torch.empty(2**20, device="cuda")
    return {
        "name": torch.cuda.get_device_name(),
        "devices": torch.cuda.device_count(),
        "kernels": kernels(made),
        "moved": moved,
        "back": back,
        "computed": computed,
        "copied": copied,
        "refused": refused,
        "held": torch.cuda.memory_allocated() - empty - held.nbytes,
        "too much": _too_much(),
    }


def _too_much() -> str:
    try:
        torch.empty(2**40, device="cuda", dtype=torch.uint8)
    except torch.OutOfMemoryError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    print(json.dumps(found()))
