"""Whole trainers over the same ranks: plain PyTorch, DeepSpeed and Megatron, with HF's model or a scheduled one.

All have the same model, weights, global batch, AdamW, clipping and precision. What differs is the trainer and how
it spreads the model: data parallelism over all ranks, or TP with data parallelism over the rest. One whose losses
are not those of the first is left out, with its reason. Each run is a torchrun of its own; they take turns in
changing order, and a ratio is taken round by round. What has run is written at once, and is not run again when the
same command is given again. What was left out is tried again.

    python bench/trainers.py [--ranks 4] [--tp 2] [--shape mini] [--rounds 5]
    python bench/trainers.py --bf16 --only hf_ddp megasched_ddp
    python bench/trainers.py --nodes 2 --launcher "srun --nodes 2 --ntasks-per-node 1" --endpoint HOST:29500

Over several machines the launcher starts the same torchrun on each. They share the folder of the results.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import machine
import ratios
import shapes
import trainer_worker
from contenders import turn_order

BASES = ("hf_ddp", "megatron_native")
# How far losses of two trainers may be apart, relative: in float32, and where products are rounded to bfloat16.
LOSSES = {False: 1e-5, True: 2e-3}
LIMIT = 1800.0  # seconds of a run
DEEPSPEED = Path(sys.prefix) / "deepspeed"  # where `make setup` puts it


@dataclass(frozen=True)
class Nodes:
    """The machines of a comparison.

    Attributes:
        count: of them.
        launcher: command that starts the command behind it on each; empty for this machine alone.
        endpoint: ``HOST:PORT`` of one of them, where they meet; empty for this machine alone.
    """

    count: int = 1
    launcher: tuple[str, ...] = ()
    endpoint: str = ""

    def torchrun(self, ranks: int) -> list[str]:
        """What stands before the worker's command."""
        from megasched.launch.torchrun.start import free_port

        if self.endpoint:
            meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", self.endpoint, "--nnodes", str(self.count)]
        else:
            meeting = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        each = ["--nproc-per-node", str(ranks // self.count)]
        return [*self.launcher, sys.executable, "-m", "torch.distributed.run", *meeting, *each]


ONE_NODE = Nodes()


class LeftOutError(Exception):
    """A trainer can't run, or does something else than the others."""


def run_once(name: str, job: trainer_worker.Job, folder: Path, nodes: Nodes) -> dict[str, Any]:
    """One trainer in processes of its own.

    Raises:
        LeftOutError: it failed, or took too long.
    """
    into, log = folder / f"{name}.json", folder / f"{name}.log"
    worker = [str(Path(trainer_worker.__file__)), json.dumps(asdict(job)), name, str(into)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*nodes.torchrun(job.ranks), *worker],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=_environment(name, job),
        )
        try:
            process.wait(LIMIT)
        except subprocess.TimeoutExpired as error:
            raise LeftOutError(f"it took more than {LIMIT:.0f} s") from error
        finally:
            process.terminate()  # torchrun ends its ranks
            process.wait()
    failed = into.with_suffix(".failed")
    if failed.exists():
        raise LeftOutError(failed.read_text())
    if not into.exists():
        lines = log.read_text(errors="replace").split("\n")
        raise LeftOutError(next((line for line in reversed(lines) if line.strip()), "it said nothing"))
    return json.loads(into.read_text())


def _environment(name: str, job: trainer_worker.Job) -> dict[str, str]:
    found = dict(os.environ)
    if job.rehearse:
        found |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    if trainer_worker.TRAINERS[name].deepspeed and DEEPSPEED.is_dir():
        found["PYTHONPATH"] = os.pathsep.join([str(DEEPSPEED), *filter(None, [found.get("PYTHONPATH")])])
    return found


def _deepspeed() -> str | None:
    found = distributions(name="deepspeed", path=[str(DEEPSPEED), *sys.path])
    return next((one.version for one in found), None)


class Results:
    """What has run so far, in its file."""

    def __init__(self, path: Path, job: trainer_worker.Job) -> None:
        self.path, self.job = path, job
        self.runs: dict[str, list[dict[str, Any]]] = {}
        self.left_out: dict[str, str] = {}
        if path.exists():
            there = json.loads(path.read_text())
            if (there["job"], there["machine"]) != (asdict(job), machine.describe()):
                what = "runs of another job, machine, version or commit"
                raise ValueError(f"{path} has {what}: remove it, or give another --name")
            self.runs = there["runs"]

    def add(self, name: str, run: dict[str, Any]) -> None:
        """Takes a run.

        Raises:
            LeftOutError: its losses are not those of the first trainer that ran.
        """
        first = next(iter(self.runs.values()), [run])[0]
        pairs = zip(run["losses"], first["losses"], strict=True)
        off = max(abs(own - other) / abs(other) for own, other in pairs)
        if not off <= LOSSES[self.job.bf16]:
            raise LeftOutError(f"its losses are {off:.1e} off those of the first trainer")
        self.runs.setdefault(name, []).append(run)

    def drop(self, name: str, reason: str) -> None:
        self.runs.pop(name, None)
        self.left_out[name] = reason

    def write(self) -> dict[str, Any]:
        """The figures are of the rounds that all trainers have."""
        rounds = min(map(len, self.runs.values()), default=0)
        seconds = {name: [run["seconds"] for run in runs[:rounds]] for name, runs in self.runs.items()}
        tokens = self.job.setting(1).tokens
        data = {
            "job": asdict(self.job),
            "deepspeed": _deepspeed(),
            "layouts": {name: self._layout(name) for name in self.runs},
            **(ratios.summary(seconds, tokens, BASES) if rounds else {}),
            "peak_bytes": {name: max(max(r["peak_bytes"]) for r in runs) for name, runs in self.runs.items()},
            "left_out": self.left_out,
            "runs": self.runs,
        }
        machine.write(self.path.stem, data, self.path.parent)
        return data

    def _layout(self, name: str) -> dict[str, int]:
        tp = self.job.tp if trainer_worker.TRAINERS[name].cut else 1
        return {"tp": tp, "dp": self.job.ranks // tp}


def compare(
    names: Sequence[str], job: trainer_worker.Job, rounds: int, path: Path, nodes: Nodes = ONE_NODE
) -> dict[str, Any]:
    """Runs what the file lacks, in turns.

    Raises:
        ValueError: the file has runs of something else.
    """
    results = Results(path, job)
    with tempfile.TemporaryDirectory(prefix="trainers", dir=path.parent if nodes.launcher else None) as folder:
        for number in range(rounds):
            for name in turn_order(names, number):
                if name in results.left_out or len(results.runs.get(name, ())) > number:
                    continue
                into = Path(folder) / str(number)
                into.mkdir(exist_ok=True)
                try:
                    run = run_once(name, job, into, nodes)
                    results.add(name, run)
                    print(f"round {number}, {name}: {run['seconds']:.3f} s a step", file=sys.stderr, flush=True)
                except LeftOutError as reason:
                    results.drop(name, str(reason))
                    print(f"round {number}, {name}: LEFT OUT, {reason}", file=sys.stderr, flush=True)
                results.write()
    return results.write()


def table(data: Mapping[str, Any]) -> str:
    """The results as lines of text."""
    lines = [f"{'':26} {'TP x DP':>8} {'tokens/s':>9} {'vs ' + BASES[0]:>10} {'peak GB':>8}"]
    for name, speed in data.get("tokens_per_second", {}).items():
        layout, versus = data["layouts"][name], data["speed_relative_to"].get(BASES[0], {}).get(name)
        ratio = "" if versus is None else f"{versus['median']:.3f}"
        cells = f"{layout['tp']:>5} x {layout['dp']} {speed:9.0f} {ratio:>10}"
        lines.append(f"{name:26} {cells} {data['peak_bytes'][name] / 1e9:8.2f}")
    return "\n".join([*lines, *(f"{name:26} left out: {reason}" for name, reason in data["left_out"].items())])


def main() -> None:
    import torch

    gpus = torch.cuda.device_count() if machine.on_gpu() else 0
    own = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own.add_argument("--shape", choices=shapes.SHAPES, default="1b" if gpus else "mini")
    own.add_argument("--ranks", type=int, help="of all nodes; by default its GPUs, or 4, on each")
    own.add_argument("--tp", type=int, default=2)
    own.add_argument("--sequences", type=int, default=8, help="in a step, over all ranks")
    own.add_argument("--rounds", type=int, default=5)
    own.add_argument("--bf16", action="store_true", help="products in bfloat16, updates in float32")
    own.add_argument("--warmup", type=int, default=3, help="steps before, whose losses are compared")
    own.add_argument("--steps", type=int, default=5, help="timed steps of a run")
    own.add_argument(
        "--only", nargs="+", choices=trainer_worker.TRAINERS, help="these; the first one's losses count"
    )
    own.add_argument("--nodes", type=int, default=1)
    own.add_argument("--launcher", default="", help="command that starts another one on each node")
    own.add_argument("--endpoint", default="", help="HOST:PORT of a node")
    own.add_argument("--name", help="of the results file; made from the options otherwise")
    own.add_argument("--folder", type=Path, default=machine.RESULTS, help="of the results file")
    options = own.parse_args()
    ranks = options.ranks or options.nodes * (gpus or 4)
    counts = (ranks, options.tp, options.sequences, options.warmup, options.steps)
    told = [options.shape.replace(".", "_"), f"tp{options.tp}", f"{ranks}ranks", "gpu" if gpus else "cpu"]
    told += [f"{options.nodes}nodes"] if options.nodes > 1 else []
    told += ["bf16"] if options.bf16 else []
    name = options.name or "_".join(["trainers", *told])
    path = options.folder / f"{name}.json"
    try:
        job = trainer_worker.Job(options.shape, *counts, rehearse=not gpus, bf16=options.bf16)
        nodes = Nodes(options.nodes, tuple(shlex.split(options.launcher)), options.endpoint)
        data = compare(options.only or list(trainer_worker.TRAINERS), job, options.rounds, path, nodes)
    except ValueError as error:
        own.error(str(error))
    print(f"{table(data)}\n{path}")


if __name__ == "__main__":
    main()
