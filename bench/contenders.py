"""Tokens per second and peak memory: HF, HF compiled, HF with Liger's kernels, megasched, Megatron native.

One rank, the same shape, data and precision. Every contender runs in Megatron's own ``train_step``: the HF
ones too, as a model chunk of theirs (``hf_side.py``). So optimizer (Megatron's, on torch's AdamW or Transformer
Engine's FusedAdam), gradient clipping, float32 main gradients and master weights under bf16, and the reduction of
the loss are one code for all; the loss of each token is cross entropy in float32 for all. Only the computation of
the model differs.

Each contender has a process of its own; they take turns in changing order, and idle between. A turn is one step
to warm up and ``--steps`` timed ones. A ratio is taken round by round. One that can't be built is left out of the
ratios, with its reason in the results. A model of 1.2 billion parameters keeps 22 GB: ``--stays native`` has the
others come to that one by one, or ``--beside`` many at a time. Those that come together are built at once.
``--kernels`` ends with what torch's profiler sees of a step of each.

In a rehearsal all run under the same emulation of CUDA. What it costs is counted for each: the functions that it
intercepts in a step, times the time of one interception (``emulation`` in the results). The compiled
contender runs its model outside of it.

    python bench/contenders.py --rehearse
    python bench/contenders.py --rehearse --bf16
    python bench/contenders.py --rehearse --shape moe
    python bench/contenders.py --shape 1b --bf16 --steps 5 --stays native [--micro-batch-size 4] [--fp8]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import machine
import native
import ratios
import trainer_side
from one_rank import one_rank
from shapes import SHAPES

# Levels of megasched: name -> what --model-schedule says. A further level is one more line.
_FILE = str(Path(__file__).with_name("levels.py"))
LEVELS = {level: f"{_FILE}:{level}" for level in ("leaf", "fused", "block")}
HF = {
    "hf_eager": "hf_side.HFModelBuilder",
    "hf_compile": "hf_side.CompiledHFModelBuilder",
    "hf_liger": "hf_side.LigerHFModelBuilder",
}
BASES = ("native", "hf_eager")
FP8 = ("--fp8-format", "hybrid")


@dataclass(frozen=True)
class Contender:
    """Who builds the model chunk (class by import path), and what ``--model-schedule`` says."""

    builder: str
    schedule: str = "auto"


def all_contenders() -> dict[str, Contender]:
    """Every contender by name."""
    return {
        "native": Contender(native.NATIVE),
        **{name: Contender(builder) for name, builder in HF.items()},
        **{f"megasched_{level}": Contender(trainer_side.MEGASCHED, text) for level, text in LEVELS.items()},
    }


class Worker:
    """A contender's process."""

    def __init__(
        self, name: str, contender: Contender, setting: trainer_side.Setting, folder: Path, beside: int = 0
    ) -> None:
        """Starts it.

        Args:
            beside: how many others are built at the same time; on a GPU each takes its share of the host.
        """
        share = str(max(1, len(os.sched_getaffinity(0)) // (beside + 1)))
        limited = () if setting.rehearse else ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
        self.log = folder / f"{name}.log"
        self.channel, theirs = Pipe()
        spec = {**asdict(contender), "setting": asdict(setting)}
        command = [sys.executable, str(Path(__file__).with_name("contender_worker.py"))]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno()), json.dumps(spec)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env={**dict.fromkeys(limited, share), **os.environ, **one_rank()},
            )
        theirs.close()

    def receive(self) -> Any:
        """What the worker sends next; ``("failed", reason)`` if it died."""
        try:
            return self.channel.recv()
        except EOFError:
            self.process.wait()
            return "failed", f"the process ended with {self.process.returncode}; {_tail(self.log)}"

    def ask(self, *order: Any) -> dict[str, Any]:
        """Carries out an order.

        Raises:
            RuntimeError: the worker died.
        """
        self.channel.send(order)
        answer = self.receive()
        if isinstance(answer, tuple):
            raise RuntimeError(answer[1])
        return answer

    def close(self) -> None:
        self.channel.close()
        self.process.wait()


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


class Field:
    """The contenders that are in memory, by name, and why others could not be built."""

    def __init__(self, setting: trainer_side.Setting, folder: Path) -> None:
        self.setting, self.folder = setting, folder
        self.workers: dict[str, Worker] = {}
        self.left_out: dict[str, str] = {}
        self.emulation: dict[str, Any] = {}
        self.kernels: dict[str, Any] = {}

    def enter(self, contenders: Mapping[str, Contender]) -> None:
        """Starts those that are not there and can be built: all at once, but for their first steps."""
        new = [name for name in contenders if name not in self.workers and name not in self.left_out]
        come = {name: Worker(name, contenders[name], self.setting, self.folder, len(new) - 1) for name in new}
        for name, worker in come.items():
            state, reason = worker.receive()
            if state == "built":
                worker.channel.send(("begin",))
                state, reason = worker.receive()
            if state == "ready":
                self.workers[name] = worker
                self.emulation[name] = worker.ask("emulation")
                print(f"{name}: ready", file=sys.stderr, flush=True)
            else:
                self.left_out[name] = reason
                worker.close()
                print(f"{name}: LEFT OUT, {reason}", file=sys.stderr, flush=True)

    def profile(self) -> None:
        """Asks each that is there for its kernels, once."""
        for name, worker in self.workers.items():
            if name not in self.kernels:
                self.kernels[name] = worker.ask("kernels")

    def leave(self, *names: str) -> None:
        for name in names:
            if name in self.workers:
                self.workers.pop(name).close()


def groups(names: Sequence[str], stays: str | None, beside: int = 1) -> list[list[str]]:
    """Who are in memory together: ``stays`` with so many ``beside``, or all where nobody stays."""
    if stays is None:
        return [list(names)]
    others = [name for name in names if name != stays]
    return [[stays, *others[first : first + beside]] for first in range(0, len(others), beside)]


def compare(
    contenders: Mapping[str, Contender],
    setting: trainer_side.Setting,
    rounds: int,
    steps: int,
    stays: str | None = None,
    beside: int = 1,
    kernels: bool = False,
    on_group: Callable[[dict[str, Any]], object] = lambda data: None,
) -> dict[str, Any]:
    """Builds the contenders and lets them step in turn.

    Args:
        stays: the contender to which the others come; None for all at once.
        beside: how many come to it at a time.
        kernels: whether to look at each one's kernels, when all have taken their turns.
        on_group: called with the results so far when those that were in memory together are done.
    """

    def so_far() -> dict[str, Any]:
        return {
            "setting": asdict(setting),
            **ratios.together([ratios.summary(seconds, setting.tokens, BASES) for seconds in turns]),
            "peak_bytes": peaks,
            "emulation": field.emulation if setting.rehearse else {},
            **({"kernels": field.kernels} if kernels else {}),
            "left_out": field.left_out,
        }

    turns: list[dict[str, list[float]]] = []
    peaks: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="contenders") as folder:
        field = Field(setting, Path(folder))
        try:
            for names in groups(list(contenders), stays, beside):
                field.enter({name: contenders[name] for name in names})
                turns.append(_in_turn(field.workers, rounds, steps, peaks))
                on_group(so_far())
                if kernels:
                    field.profile()
                    on_group(so_far())
                field.leave(*(name for name in names if name != stays))
        finally:
            field.leave(*field.workers)
    return so_far()


def _in_turn(
    workers: Mapping[str, Worker], rounds: int, steps: int, peaks: dict[str, int]
) -> dict[str, list[float]]:
    """Seconds of a step in each round, by name; ``peaks`` is filled in."""
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    for number in range(rounds):
        for name in turn_order(list(workers), number):
            answer = workers[name].ask("steps", steps)
            seconds[name].append(sum(answer["seconds"]) / steps)
            peaks[name] = max(peaks.get(name, 0), answer["peak_bytes"])
    return seconds


def turn_order(names: Sequence[str], number: int) -> list[str]:
    """The order of round ``number``: another one begins each time, and every second round runs backwards."""
    first = number // 2 % max(len(names), 1)
    order = [*names[first:], *names[:first]]
    return order[::-1] if number % 2 else order


def main() -> None:
    own = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own.add_argument("--shape", choices=SHAPES, default="cpu")
    own.add_argument("--micro-batch-size", type=int, default=1)
    own.add_argument("--rounds", type=int, default=10)
    own.add_argument("--steps", type=int, default=1, help="timed steps of a turn")
    own.add_argument("--bf16", action="store_true")
    own.add_argument("--fp8", action="store_true", help=f"adds {' '.join(FP8)}; who refuses it is left out")
    own.add_argument("--rehearse", action="store_true")
    own.add_argument("--only", nargs="+", choices=all_contenders(), help="these contenders alone")
    own.add_argument("--stays", choices=BASES, help="this one stays in memory, the others come to it")
    own.add_argument("--beside", type=int, default=1, metavar="N", help="so many at a time, with --stays")
    own.add_argument("--kernels", action="store_true", help="what torch's profiler sees of a step of each")
    own.add_argument("--name", help="of the results file; made from the options otherwise")
    own.add_argument("--folder", type=Path, default=machine.RESULTS, help="of the results file")
    options = own.parse_args()
    chosen = {n: c for n, c in all_contenders().items() if not options.only or n in (*options.only, options.stays)}
    setting = trainer_side.setting_from(options, FP8 if options.fp8 else ())
    precision = "fp8" if options.fp8 else "bf16" if options.bf16 else "fp32"
    where = "cpu" if options.rehearse else "gpu"
    name = options.name or f"contenders_{options.shape.replace('.', '_')}_{precision}_{where}"

    def write(data: dict[str, Any]) -> Path:
        return machine.write(name, data, options.folder)

    how = (options.stays, options.beside, options.kernels)
    data = compare(chosen, setting, options.rounds, options.steps, *how, on_group=write)
    path = write(data)
    print(f"{table(data)}\n{path}")


def table(data: Mapping[str, Any]) -> str:
    """The results as lines of text."""
    lines = [f"{'':16} {'tokens/s':>9} {'vs native':>10} {'vs hf_eager':>12} {'peak GB':>8}"]
    for name, speed in data["tokens_per_second"].items():
        versus = [data["speed_relative_to"].get(base, {}).get(name) for base in BASES]
        cells = ["" if one is None else f"{one['median']:.3f}" for one in versus]
        lines.append(f"{name:16} {speed:9.0f} {cells[0]:>10} {cells[1]:>12} {data['peak_bytes'][name] / 1e9:8.2f}")
    lines += [f"{name:16} left out: {reason}" for name, reason in data["left_out"].items()]
    unseen = {name: one for name, one in data.get("kernels", {}).items() if not one.get("kernels")}
    lines += [
        f"{name:16} kernels: {one.get('why', 'torch has seen none in its profile')}"
        for name, one in unseen.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
