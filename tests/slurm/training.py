"""A small training under Slurm, on nodes of one rank, on the CPU; and what its logs say."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from megasched.launch.run_folder import RunFolder
from megasched.launch.slurm.script import SlurmJob, render
from megasched.launch.slurm.start import Prepared, write
from tests.slurm.lab import Lab

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Size:
    """How large a training is: its ranks, a node each, at TP2 x (ranks / 2) stages, and how long."""

    ranks: int
    iterations: int
    save_interval: int = 5

    @property
    def flags(self) -> list[str]:
        return (
            "--rehearse --model-schedule auto --hf-random-init --tensor-model-parallel-size 2 "
            f"--pipeline-model-parallel-size {self.ranks // 2} --seq-length 16 --micro-batch-size 1 "
            f"--global-batch-size 4 --train-iters {self.iterations} --lr 1e-3 --min-lr 1e-4 "
            "--lr-decay-style constant --mock-data --split 100,0,0 --tokenizer-type NullTokenizer --vocab-size 99 "
            "--make-vocab-size-divisible-by 4 --eval-iters 0 --log-interval 1 --use-distributed-optimizer "
            f"--ckpt-format torch_dist --save-interval {self.save_interval} --num-dataset-builder-threads 1 "
            "--no-mmap-bin-files"
        ).split()


LONG, SHORT = Size(ranks=4, iterations=40), Size(ranks=2, iterations=20)
LINE = re.compile(r" iteration\s+(\d+)/\s*\d+ \|.* lm loss: (\S+) \|.* grad norm: (\S+) \|")


@dataclass
class Training:
    """One run, of one job or several.

    Attributes:
        size: what it takes.
        folder: its run folder.
        model: the HF model's folder.
        options: flags beyond those of its size.
        changes: fields of ``SlurmJob``.
        jobs: that were submitted.
    """

    lab: Lab
    size: Size
    folder: RunFolder
    model: Path
    options: tuple[str, ...] = ()
    changes: dict = field(default_factory=dict)
    jobs: list[int] = field(default_factory=list)

    @property
    def save(self) -> Path:
        return self.folder.path / "checkpoints"

    @property
    def job(self) -> SlurmJob:
        own = [*self.size.flags, "--hf-model", str(self.model), "--save", str(self.save)]
        own += ["--data-cache-path", str(self.model / "cache"), *self.options]
        given = {
            "name": "night",
            "run_folder": self.folder.path,
            "directory": ROOT,
            "nodes": self.size.ranks,
            "gpus_per_node": 1,
            "cpus_per_gpu": 1,  # and as many threads: the machine has fewer cores than the nodes pretend to
            "script": "pretrain_gpt.py",
            "flags": tuple(own),
            "python": sys.executable,
            "time": "30",
        }
        return SlurmJob(**(given | self.changes))

    def submit(self, *options: str) -> int:
        script = write(Prepared(self.job, render(self.job)))
        self.jobs.append(self.lab.submit(script, *options))
        return self.jobs[-1]

    def log(self, job: int, restart: int) -> str:
        """What the ranks of one start have printed."""
        folder = self.folder.attempt_folder(str(job), restart)
        return "".join(path.read_text(errors="replace") for path in sorted(folder.glob("node-*.log")))

    def iterations(self, job: int, restart: int) -> dict[int, tuple[str, str]]:
        """Iteration -> loss and gradient norm, as printed."""
        return {int(n): (loss, norm) for n, loss, norm in LINE.findall(self.log(job, restart))}

    def reach(self, job: int, iteration: int, restart: int = 0, seconds: float = 180) -> None:
        """Waits until a start has come to an iteration."""
        self.lab.until(
            lambda: max(self.iterations(job, restart), default=0) >= iteration,
            f"iteration {iteration} of job {job}, restart {restart}",
            seconds,
            job,
        )

    def starts(self, *jobs: int) -> list[tuple[int, int]]:
        """Job and restart of every start, in their order."""
        found = [tuple(map(int, path.name.split("-"))) for path in self.folder.logs.glob("*-*/")]
        return sorted((job, restart) for job, restart in found if job in jobs)

    def check_equal(self, other: Training, *jobs: int) -> None:
        """Every iteration of these jobs, put together over the starts, is what another run had.

        Megatron's second line of a process holds a mean with the first one in it (training_log.py), so those of
        restarts are compared by their gradient norm alone.
        """
        (expected,) = [other.iterations(*start) for start in other.starts(*other.jobs)]
        seen: set[int] = set()
        for start in self.starts(*jobs):
            found = self.iterations(*start)
            for number, (iteration, (loss, norm)) in enumerate(sorted(found.items())):
                wanted = expected[iteration]
                assert abs(float(norm) - float(wanted[1])) <= 0.0015, (start, iteration, norm, wanted)
                if number != 1:
                    assert abs(float(loss) / float(wanted[0]) - 1) < 2e-6, (start, iteration, loss, wanted)
            seen |= set(found)
        assert seen == set(range(1, self.size.iterations + 1))

    def check_saved(self) -> None:
        """All checkpoints that are due are there, whole; the last one is the last iteration's."""
        assert self.last_saved() == self.size.iterations
        for iteration in range(self.size.save_interval, self.size.iterations + 1, self.size.save_interval):
            names = {path.name for path in (self.save / f"iter_{iteration:07d}").iterdir()}
            assert {".metadata", "metadata.json"} <= names, (iteration, names)
            assert sum(name.endswith(".distcp") for name in names) == self.size.ranks, (iteration, names)
        assert not list(self.save.glob(".megasched/claim-*"))

    def last_saved(self) -> int:
        tracker = self.save / "latest_checkpointed_iteration.txt"
        return int(tracker.read_text()) if tracker.exists() else 0
