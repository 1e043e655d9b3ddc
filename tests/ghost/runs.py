"""Runs of Megatron's trainer on ghost GPUs."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from tests import tiny
from tests.ghost import process
from tests.ghost.collectives import disagreements
from tests.ghost.ledger import waits

LEVELS = str(process.ROOT / "bench" / "levels.py")
WITHOUT_TE = [*process.WITHOUT_TE, "--no-gradient-accumulation-fusion"]
# Megatron's flags of two ranks each, and of the distributed optimizer that overlaps.
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
EP2 = "--expert-model-parallel-size 2"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
_TRAINED = ["--lr", "1e-3", "--eval-iters", "0", "--eval-interval", "1000", "--log-interval", "1"]
_TRAINED += ["--micro-batch-size", "1", "--global-batch-size", "4", "--num-workers", "0"]
_MOCKED = ("--tokenizer-type", "NullTokenizer", "--mock-data", "--vocab-size", "500")


# A model that kernels of GPUs take: heads of 64, and sizes that 8-bit products can be cut into, on two ranks, too.
_WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
_WIDE |= {"num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256}
LENGTH = 256


def write_model(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """Writes the config of a small model that kernels of GPUs take, and returns the folder."""
    usual = tiny.config(family)  # a field that it lacks, as GPT-2 lacks groups of heads, would say something else
    tiny.save(
        family, folder, **{**{name: size for name, size in _WIDE.items() if hasattr(usual, name)}, **changes}
    )
    return folder


class Run:
    """What a run said, what each rank asked of its GPU in each step, and its facts (``trainer_case.py``)."""

    def __init__(self, said: str, steps: list[list[list[str]]], facts: list[dict[str, Any]]) -> None:
        self.said = said
        self.steps = steps
        self.facts = facts

    @property
    def iterations(self) -> list[int]:
        """The numbers of the iterations that the log tells of."""
        return [int(number) for number in re.findall(r"iteration +(\d+)/", self.said)]

    @property
    def waits(self) -> list[int]:
        """How many times the host waits in the last step, by rank: in earlier ones, kernels are compiled."""
        return [waits(steps[-1]) for steps in self.steps]

    def faults(self, iterations: Sequence[int] = (1, 2)) -> list[str]:
        """Says what is not as it must be in a run of these iterations; nothing if all is."""
        return list(self._faults(list(iterations)))

    def _faults(self, iterations: list[int]) -> Iterator[str]:
        if self.iterations != iterations:
            yield f"the log tells of iterations {self.iterations}"
        for rank, steps in enumerate(self.steps):
            if len(steps) != len(iterations) or not all(steps):
                yield f"rank {rank} made steps of {[len(step) for step in steps]} events"
        yield from disagreements([list(chain(*steps)) for steps in self.steps])
        yield from (line for line in self.said.splitlines() if "isn't covered" in line)


def train(
    model: Path,
    schedule: str,
    flags: Sequence[str],
    *,
    ranks: int = 1,
    te: bool = False,
    iterations: int = 2,
    length: int = 64,
    precision: str = "--bf16",
    data: Sequence[str] = _MOCKED,
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
        precision: the flag that says it.
        data: flags of tokenizer and data set; by default sequences that Megatron makes up.
        more: further environment variables.
    """
    level = f"{LEVELS}:{schedule}" if schedule in ("leaf", "fused", "block") else schedule
    given = ["--model-schedule", level, "--hf-model", str(model), "--hf-random-init"]
    given += ["--seq-length", str(length)]
    return _train([*given, *data, precision, *flags], ranks, te, iterations, {"MEGASCHED_TRACEBACK": "1", **more})


def train_native(
    flags: Sequence[str], *, ranks: int = 1, te: bool = False, iterations: int = 2, **more: str
) -> Run:
    """Trains Megatron's own GPT, which these flags describe, as ``train`` does a model under megasched."""
    return _train([*_MOCKED, "--bf16", *flags], ranks, te, iterations, more)


def _train(flags: Sequence[str], ranks: int, te: bool, iterations: int, more: Mapping[str, str]) -> Run:
    given = [*_TRAINED, "--train-iters", str(iterations), *([] if te else WITHOUT_TE), *flags]
    with tempfile.TemporaryDirectory() as folder:
        command = ["-m", "tests.ghost.trainer_case", folder, "pretrain_gpt.py", *given]
        said = process.run(command, ranks=ranks, te=te, **more)
        events = [Path(folder, f"events.{rank}").read_text().splitlines() for rank in range(ranks)]
        facts = [json.loads(Path(folder, f"facts.{rank}").read_text()) for rank in range(ranks)]
    return Run(said, [_steps(one) for one in events], facts)


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
