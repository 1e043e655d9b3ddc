"""Checkpoints that are changed on purpose."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from megasched.reading.tracker import RELEASE, TRACKER
from megasched.weights.exporting import export_weights
from megasched.weights.importing import import_weights
from megasched.weights.lazy import LazyTensor
from megasched.weights.torch_dist.reader import TorchDist
from megasched.weights.torch_dist.writer import TorchDistWriter
from tests import tiny

Tensors = dict[str, LazyTensor]


def silent(size: int) -> Any:
    return nullcontext(lambda count: None)


def weights(family: str, folder: Path, max_shard_size: str = "5GB", **changes: Any) -> str:
    """An HF folder with random weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(tiny.config(family, **changes)).save_pretrained(
        folder, max_shard_size=max_shard_size
    )
    return str(folder)


def imported(model: str, save: Path) -> Path:
    """A ``release`` checkpoint of an HF folder."""
    return import_weights(model, save, progress=silent).checkpoint


def exported(load: Path, output: Path, model: str) -> Path:
    return export_weights(load, output, progress=silent, hf_model=model, max_shard_size=1 << 30).output


def rewritten(good: Path, save: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """A complete checkpoint with other tensors, as a run's ``--load``."""
    (save / RELEASE).mkdir(parents=True)
    checkpoint = TorchDist(good / RELEASE)
    writer = TorchDistWriter(save / RELEASE, lambda count: None)
    for name, tensor in change(dict(checkpoint.tensors)).items():
        writer.add(name, tensor, tensor.dtype)
    writer.finish(checkpoint.common)
    (save / TRACKER).write_text(RELEASE)
    return save


@contextmanager
def changed_bytes(path: Path, change: Callable[[bytes], bytes]) -> Any:
    """The file with other bytes; as it was afterwards."""
    content = path.read_bytes()
    path.write_bytes(change(content))
    try:
        yield
    finally:
        path.write_bytes(content)


def flipped(content: bytes, at: int) -> bytes:
    """One bit of a byte is another."""
    return content[:at] + bytes([content[at] ^ 0x40]) + content[at + 1 :]
