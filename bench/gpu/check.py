"""Checks megasched on the GPUs of this machine, step by step; docs/gpu_check.md says what each step tells.

Each step has a process of its own, at most ten minutes, and a file ``RESULTS/NAME.json``, which is written when
the step begins, and whole when it ends. Those that time nothing run side by side. A step that has ended on this
commit is passed by, so that a check which was cut off goes on where it was; the numerics go on within themselves.

    python bench/gpu/check.py [--results DIR] [--only STEP ...] [--again]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from common import HERE, ROOT, on_ghost

from megasched.files import write_whole

# The most that a step may take, in seconds.
MOST = 600
LOG_LINES = 40
# What a record may say of a step that has come to its end.
ENDED, CUT_OFF = ("passed", "failed"), "cut off"
FOLDER = "FOLDER"  # in a command: the step's own folder


@dataclass(frozen=True)
class Step:
    """One step of the check.

    Attributes:
        name: what its files are called.
        command: arguments of Python; ``FOLDER`` stands for its folder.
        seconds: its limit.
        te: whether it needs Transformer Engine.
        alone: whether it times the GPU, and has it to itself.
        printed: the file of its folder that takes its standard output; empty where that goes to the log.
    """

    name: str
    command: tuple[str, ...]
    seconds: int = MOST
    te: bool = False
    alone: bool = True
    printed: str = ""


# Shape -> the shape that a rehearsal has in its place, and the bytes that a contender keeps between steps.
SHAPES = {"1b": ("tiny", 22e9), "qwen3-1.7b": ("qwen3-tiny", 31e9), "mixtral-1b": ("moe-tiny", 18e9)}
SEQUENCES = 2
# What one step takes beside, a context of CUDA included, and a context of those that wait for their turn.
STEP_BYTES, CONTEXT_BYTES = 36e9, 1e9
KINDS = {
    "bf16": ("hf_eager", "megasched_block", "megasched_fused"),
    "fp8": ("megasched_block", "megasched_fused"),
    "others": ("megasched_leaf", "hf_compile", "hf_liger"),
}
# Steps that time nothing run at once. Each of their processes is given little of the host: by default, torch takes
# as many threads as there are cores, and starts as many more processes to compile.
CORES_OF_A_STEP = 5
MODEST = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def steps(small: bool = False, memory: float = 80e9) -> list[Step]:
    """The steps in their order: what tells most in the least time comes first.

    Args:
        small: in sizes for a rehearsal.
        memory: bytes of the GPU.
    """
    megasched, quick = ("-m", "megasched"), ("--iters", "4" if small else "100", "--dir", f"{FOLDER}/run")
    found = [
        Step("doctor", (*megasched, "doctor", "--json"), 120, alone=False, printed="doctor.json"),
        Step(
            "quickstart", (*megasched, "quickstart", "--json", *quick), 300, alone=False, printed="quickstart.json"
        ),
        Step("nccl", (_script("nccl_groups.py"), FOLDER), 180, alone=False),
        Step("numerics", (_script("numerics.py"), FOLDER), alone=False),
        Step("numerics_te", (_script("numerics.py"), FOLDER, "--te"), te=True, alone=False),
    ]
    for kind in KINDS:
        found += [_contenders(shape, kind, small, memory) for shape in SHAPES]
    found += [
        Step("calibration", (*megasched, "plan", "--calibrate", f"{FOLDER}/gpu.toml"), 300),
        Step("planner", (_script("planned.py"), FOLDER)),
    ]
    return found


def _contenders(shape: str, kind: str, small: bool, memory: float) -> Step:
    size = ("--rounds", "1", "--steps", "1") if small else ("--rounds", "4", "--steps", "5")
    more = ("--fp8",) if kind == "fp8" else ()
    command = (str(ROOT / "bench" / "contenders.py"), "--shape", _shape(shape, small), "--bf16", *more, *size)
    command += ("--micro-batch-size", "1" if small else str(SEQUENCES), "--kernels")
    command += ("--stays", "native", "--beside", str(beside(SHAPES[shape][1], memory)), "--only", *KINDS[kind])
    return Step(
        f"{shape.replace('.', '_')}_{kind}", (*command, "--folder", FOLDER, "--name", "contenders"), te=True
    )


def beside(kept: float, memory: float) -> int:
    """How many contenders, each of which keeps so many bytes, come to native at a time."""
    return max(1, int((memory - STEP_BYTES) / (kept + CONTEXT_BYTES)) - 1)


def _shape(shape: str, small: bool) -> str:
    return SHAPES[shape][0] if small else shape


def _script(name: str) -> str:
    return str(HERE / name)


class Check:
    """The records of the steps in a folder, all of one commit.

    Attributes:
        results: the folder; made where it is missing.
        commit: of the code that is checked; what records of others say counts no more.
    """

    def __init__(self, results: Path, commit: str, environment: Mapping[bool, Mapping[str, str]]) -> None:
        """Opens the folder.

        Args:
            environment: variables of a step that needs Transformer Engine (True) and of one that does not.
        """
        self.results, self.commit, self.environment = results, commit, environment
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        results.mkdir(parents=True, exist_ok=True)

    def record(self, name: str) -> dict[str, Any]:
        """What is written of a step on this commit; empty where nothing is, or it can't be read."""
        try:
            found = json.loads((self.results / f"{name}.json").read_text())
        except (OSError, ValueError):
            return {}
        return found if found.get("commit") == self.commit else {}

    def run(self, step: Step, again: bool = False) -> str:
        """Runs a step unless it has ended before; returns what its record says.

        Args:
            again: from its beginning, whatever there is.
        """
        if self._stopped:
            return CUT_OFF
        known = self.record(step.name)
        if known.get("status") in ENDED and not again:
            return known["status"]
        folder = self.results / step.name
        if again or not known:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(exist_ok=True)
        self._write(step, {"status": "running"})
        start = time.monotonic()
        status, code = self._carry_out(step, folder)
        outcome = {"status": status, "exit_status": code, "seconds": round(time.monotonic() - start, 1)}
        outcome["found"] = read_folder(folder)
        if status != "passed":
            lines = (folder / "log").read_text(errors="replace").splitlines()
            outcome["log"] = lines[-LOG_LINES:]
        self._write(step, outcome)
        return status

    def stop(self) -> None:
        """Ends what is running, which is cut off then; nothing begins any more."""
        self._stopped = True
        for process in list(self._running):
            kill_group(process)  # whoever waits for it goes on waiting: this may be a signal in the midst of that

    def _write(self, step: Step, outcome: Mapping[str, Any]) -> None:
        told = {"step": step.name, "commit": self.commit, "command": step.command, "limit": step.seconds}
        write_whole(self.results / f"{step.name}.json", [json.dumps({**told, **outcome}, indent=1), "\n"])

    def _carry_out(self, step: Step, folder: Path) -> tuple[str, int | None]:
        """The status, and the exit status where the process ended by itself."""
        command = [word.replace(FOLDER, str(folder.resolve())) for word in step.command]
        with (folder / "log").open("ab") as log, (folder / (step.printed or "log")).open("ab") as printed:
            printed.truncate(0) if step.printed else None
            process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=log,
                env={**self.environment[step.te], **({} if step.alone else MODEST)},
                start_new_session=True,  # all that it starts ends with it
            )
            self._running.add(process)
            if self._stopped:  # between the question above and here
                kill_group(process)
            try:
                code = process.wait(step.seconds)
            except subprocess.TimeoutExpired:
                return CUT_OFF, None
            finally:
                end_group(process)
                self._running.discard(process)
        if self._stopped:
            return CUT_OFF, None
        return ("failed" if code else "passed"), code


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kills as ``kill_group`` does, and waits for the process."""
    kill_group(process)
    process.wait()


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a process that leads a group, what is left of the group, and its children in groups of their own.

    torchrun gives each rank a group. One that is left goes on with the GPU, beside what is timed next.
    """
    try:
        children = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        children = []
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def read_folder(folder: Path) -> dict[str, Any]:
    """What a step has left: its JSON files read, and its TOML files as text, by name."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            found[path.name] = json.loads(path.read_text())
        except ValueError:  # it was cut off while it printed
            found[path.name] = path.read_text()
    return {**found, **{path.name: path.read_text() for path in folder.glob("*.toml")}}


def this_commit() -> str:
    """The commit of the code, which a kit has written down; another one each time while files differ from it."""
    packed = ROOT / "COMMIT"
    if packed.exists():
        return packed.read_text().strip()
    git = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--exclude", "*", "--dirty"]
    found = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    return f"{found} at {time.time():.0f}" if found.endswith("-dirty") else found


def seen(environment: Mapping[str, str]) -> dict[str, Any]:
    """How many GPUs there are, the bytes of the first one, and whether there is Transformer Engine."""
    asked = "import json, torch, importlib.util as u; gpus = torch.cuda.device_count(); "
    asked += "memory = torch.cuda.get_device_properties(0).total_memory if gpus else 0; "
    asked += "te = u.find_spec('transformer_engine') is not None; "
    asked += "print(json.dumps({'gpus': gpus, 'memory': memory, 'te': te}))"
    command = [sys.executable, "-c", asked]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    names = [step.name for step in steps()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "gpu_check")
    parser.add_argument("--only", nargs="+", choices=names, metavar="STEP", help=f"of {', '.join(names)}")
    parser.add_argument("--again", action="store_true", help="from their beginning, whatever there is")
    parser.add_argument("--ghost", type=int, metavar="GPUS", help="rehearse on ghost GPUs, in small sizes")
    options = parser.parse_args(argv)
    environment = {te: on_ghost(options.ghost, te) if options.ghost else dict(os.environ) for te in (False, True)}
    there = seen(environment[True])
    if not there["gpus"]:
        print("torch sees no GPU here; `--ghost 1` rehearses the check without one", file=sys.stderr)
        return 2
    check = Check(options.results, this_commit(), environment)
    print(f"{there['gpus']} GPUs, commit {check.commit}, results in {options.results}", flush=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *received: check.stop())
    told = {}

    def run(step: Step) -> None:
        left_out = step.te and not there["te"]
        told[step.name] = "left out: no Transformer Engine" if left_out else check.run(step, options.again)
        seconds = check.record(step.name).get("seconds", "")
        print(f"{step.name:20} {told[step.name]:10} {seconds}", flush=True)

    all_steps = steps(bool(options.ghost), there["memory"])
    chosen = [step for step in all_steps if step.name in (options.only or names)]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // CORES_OF_A_STEP)) as threads:
        list(threads.map(run, [step for step in chosen if not step.alone]))
    for step in chosen:
        if step.alone:
            run(step)
    off = [name for name, status in told.items() if status != "passed"]
    print(f"not passed: {', '.join(off)}" if off else "all passed")
    return int(bool(off))


if __name__ == "__main__":
    sys.exit(main())
