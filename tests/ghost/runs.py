"""Runs of Megatron's trainer on ghost GPUs."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.ghost import process

LEVELS = str(process.ROOT / "bench" / "levels.py")
WITHOUT_TE = [*process.WITHOUT_TE, "--no-gradient-accumulation-fusion"]
_TRAINED = ["--bf16", "--lr", "1e-3", "--eval-iters", "0", "--log-interval", "1", "--hf-random-init"]
_TRAINED += ["--tokenizer-type", "NullTokenizer", "--mock-data"]


class Run:
    """What a run said, and what each rank asked of its GPU in each step."""

    def __init__(self, said: str, steps: list[list[list[str]]]) -> None:
        self.said = said
        self.steps = steps

    @property
    def iterations(self) -> int:
        """How many iterations the log tells of."""
        return len(re.findall(r"iteration +\d+/", self.said))


def train(
    model: Path,
    schedule: str,
    flags: Sequence[str],
    *,
    ranks: int = 1,
    te: bool = False,
    iterations: int = 2,
    length: int = 64,
    **more: str,
) -> Run:
    """Trains some iterations on as many ghost GPUs as ranks.

    Args:
        model: folder of an HF config.
        schedule: what ``--model-schedule`` says; ``leaf``, ``fused`` and ``block`` are those of the benchmarks.
        flags: of Megatron, further ones.
        ranks: processes.
        te: with Transformer Engine.
        iterations, length: of the training, and of a sequence.
        more: further environment variables.
    """
    level = f"{LEVELS}:{schedule}" if schedule in ("leaf", "fused", "block") else schedule
    size = ["--seq-length", str(length), "--train-iters", str(iterations), "--vocab-size", "500"]
    batch = ["--micro-batch-size", "1", "--global-batch-size", "4"]
    given = ["pretrain_gpt.py", "--model-schedule", level, "--hf-model", str(model), *size, *batch, *_TRAINED]
    with tempfile.TemporaryDirectory() as folder:
        command = ["-m", "tests.ghost.trainer_case", folder, *given, *([] if te else WITHOUT_TE), *flags]
        said = process.run(command, ranks=ranks, te=te, MEGASCHED_TRACEBACK="1", **more)
        events = [Path(folder, f"events.{rank}").read_text().splitlines() for rank in range(ranks)]
    return Run(said, [_steps(one) for one in events])


def _steps(events: list[str]) -> list[list[str]]:
    steps: list[list[str]] = []
    inside = False
    for event in events:
        if event == "mark:step":
            steps.append([])
        inside = event != "mark:end" and (inside or event == "mark:step")
        if inside and event != "mark:step":
            steps[-1].append(event)
    return steps
