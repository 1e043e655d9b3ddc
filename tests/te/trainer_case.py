"""Run by test_trainer.py: Megatron's own trainer, with Transformer Engine's Python modules, on the CPU.

Arguments: a folder, and runs as JSON (the keyword arguments of ``run``), one after the other.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.te import plain


def main(folder: Path, runs: list[dict[str, Any]]) -> None:
    plain.install()
    sys.modules["transformer_engine.pytorch.optimizers"] = None  # compiled kernels; Megatron takes torch's then
    import torch

    from megasched.patches import apply, host_cuda
    from megasched.verify.ranks import pool, worker

    torch.set_num_threads(1)
    host_cuda.install(force=True)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="0")
    os.environ[pool.FOLDER] = str(folder)  # as a pool's ranks have it
    for name in worker.PATCHES:
        apply(name)
    found = []
    for one in runs:
        found.append(run(folder, **one))
        worker.reset_megatron()
    print(json.dumps(found))


def run(
    folder: Path, family: str, flags: str = "", more: str = "", iterations: int = 3, schedule: str = "auto"
) -> dict[str, Any]:
    """Losses and gradient norms of each iteration, and what the linears of Transformer Engine were called with.

    Args:
        flags: Megatron's, as a rehearsal takes them; FOLDER in them is the folder.
        more: those that a rehearsal leaves out.
    """
    from megasched.layers.megatron import attention, layer
    from megasched.verify import trainer_run as training
    from tests import tiny

    for module in (layer, attention):
        module.uses_transformer_engine = lambda device: True
    real = training.rehearsal_flags

    def with_more(argv: list[str]) -> Any:
        found = real(argv)
        found.argv.extend(more.split())
        return found

    training.rehearsal_flags = with_more
    plain.products.clear()
    model = tiny.save(family, folder / family, hidden_size=64, intermediate_size=96)
    try:
        given = flags.replace("FOLDER", str(folder)).split()
        report = training.train(model, given, iterations=iterations, schedule=schedule)
    finally:
        training.rehearsal_flags = real
    return {
        "losses": report.losses,
        "norms": report.grad_norms,
        "recipes": sorted({product.recipe for product in plain.products}),
        "first": [product.first for product in plain.products],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
