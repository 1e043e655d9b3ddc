"""One step of architectures at levels on ghost GPUs, each in a fork of this process, which has all imports.

    python -m tests.ghost.sweep_case PAIRS.json OUTPUT

``PAIRS.json`` lists [architecture, level]. The output has a line of JSON for each, a ``Result``, in any order.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from bench.one_rank import one_rank
from megasched.collector import collector_paused
from megasched.definition.small_models.shrink import TOKENS, VOCABULARY
from megasched.errors import MegaschedError
from megasched.verify.ranks import worker
from megasched.verify.ranks.pool import FOLDER

WORKERS = 2
LIMIT = 150.0  # seconds of a pair
# Level -> ``--model-schedule``.
BENCH = Path(__file__).parents[2] / "bench" / "levels.py"
SCHEDULES = {level: f"{BENCH}:{level}" for level in ("leaf", "fused", "block")}
SCHEDULES |= {"parts": str(Path(__file__).with_name("parts.py")), "auto": "auto"}
FLAGS = ["--bf16", "--vocab-size", str(VOCABULARY), "--global-batch-size", "2", "--num-workers", "0"]
FLAGS += ["--no-create-attention-mask-in-dataloader"]  # Megatron's attention takes causal ones alone
# What a run on a GPU imports beside what the ranks of the matrix do.
IMPORTS = ("megasched.verify.trainer_run", "transformer_engine.pytorch", "torch._inductor.compile_fx")
LONGEST = 6000  # characters of a reason, its end


@dataclass(frozen=True)
class Result:
    """What became of a pair.

    Attributes:
        outcome: ``ran``; ``refused``, by an error of megasched's own; ``unsupported``, where plain transformers
            fails in bfloat16, too; ``failed``.
        why: text of the error, that of plain transformers', or the traceback; empty where it ran.
    """

    model_type: str
    level: str
    outcome: str
    why: str = ""
    seconds: float = 0.0


def train_step(model_type: str, level: str, folder: str) -> None:
    """Trains a step by Megatron's trainer on the small model and the batches of the matrix.

    Args:
        folder: an empty one, for the model.

    Raises:
        AssertionError: there is no loss, or a parameter that is trained has got no gradient.
    """
    from megatron.training import training

    from megasched.definition.small_models.small_models import write_small_model
    from megasched.trainer import entry
    from megasched.trainer.current_session import get_session
    from megasched.verify import trainer_run

    write_small_model(model_type, folder)
    entry.apply_patches()  # first: they look at the function that is watched
    missing: set[str] = set()
    real = training.train_step

    @functools.wraps(real)
    def watched(forward_step: Any, data: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        for chunk in model:
            _watch_gradients(chunk, missing)
        return real(forward_step, data, model, *args, **kwargs)

    given: dict[str, Any] = {"iterations": 1, "random_init": False, "tokens": TOKENS, "rehearse": False}
    with mock.patch.object(training, "train_step", watched):
        report = trainer_run.train(folder, FLAGS, schedule=SCHEDULES[level], **given)
    assert len(report.losses) == 1, "there is no loss"
    perhaps = tuple(get_session().reach.perhaps)  # an expert that no token of these goes to
    left = sorted(name for name in missing if not name.endswith(perhaps))
    assert not left, f"no gradient has come to {', '.join(left)}"


def _watch_gradients(chunk: Any, missing: set[str]) -> None:
    """Has a set hold the names of trained parameters until they get a gradient."""
    for name, parameter in chunk.named_parameters():
        if parameter.requires_grad:
            missing.add(name)
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: missing.discard(name))


def fault_of_definition(folder: str) -> str:
    """What plain transformers says of a step in bfloat16, on the host; empty where it does it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from megasched.verify.trainer_run import SEQUENCE

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16).train()
    tokens = torch.randint(*TOKENS, (2, SEQUENCE))
    try:
        model(tokens, labels=tokens, use_cache=False).loss.backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def outcome_of(model_type: str, level: str, log: Path) -> tuple[str, str]:
    """Trains a step in this process, a fork that does nothing else; returns outcome and reason.

    Args:
        log: where it prints.
    """
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as meeting:
        # The indices of mock data too: two that write and map one file at once have failed.
        os.environ.update(one_rank(), GHOST_FOLDER=meeting, **{FOLDER: meeting})
        try:
            train_step(model_type, level, folder)
        except MegaschedError as error:
            return "refused", str(error)
        except BaseException:
            said = traceback.format_exc()[-LONGEST:]
            own = fault_of_definition(folder)
            return ("unsupported", own) if own else ("failed", said)
    sys.stderr.flush()
    uncovered = re.findall(r".*isn't covered.*", log.read_text(errors="replace"))
    return ("failed", "\n".join(uncovered)) if uncovered else ("ran", "")


class Child:
    """A fork that does a pair."""

    def __init__(self, model_type: str, level: str, folder: Path, number: int) -> None:
        self.pair = model_type, level
        self.begun = time.monotonic()
        self._found, self._log = folder / f"{number}.json", folder / f"{number}.log"
        self._pid = os.fork()
        if self._pid == 0:
            worker.die_with_parent()
            self._found.write_text(json.dumps(outcome_of(model_type, level, self._log)))
            os._exit(0)  # process groups and threads are nobody's business any more

    def ended(self) -> Result | None:
        """The result once there is one; what takes too long is killed."""
        seconds = time.monotonic() - self.begun
        late = seconds > LIMIT
        if late:
            os.kill(self._pid, signal.SIGKILL)
        pid, status = os.waitpid(self._pid, 0 if late else os.WNOHANG)
        if pid == 0:
            return None
        if self._found.exists():
            outcome, why = json.loads(self._found.read_text())
        else:
            said = self._log.read_text(errors="replace") if self._log.exists() else ""
            ending = f"killed after {LIMIT} s" if late else f"exit status {os.waitstatus_to_exitcode(status)}"
            outcome, why = "failed", f"{said[-LONGEST:]}\n{ending}"
        return Result(*self.pair, outcome, why, round(seconds, 1))


def sweep(pairs: Sequence[tuple[str, str]], folder: Path) -> Iterator[Result]:
    """Does all pairs, ``WORKERS`` at a time; yields results as they come."""
    waiting, running = list(enumerate(pairs))[::-1], list[Child]()
    while waiting or running:
        while waiting and len(running) < WORKERS:
            number, pair = waiting.pop()
            running.append(Child(*pair, folder, number))
        time.sleep(0.02)
        for child in list(running):
            if result := child.ended():
                running.remove(child)
                yield result


def prepare() -> None:
    """Imports what a run of the trainer does, and has what torch would read again in each fork be read."""
    import torch

    torch.set_num_threads(1)
    # Once torch has counted the GPUs, it refuses to use them in a fork.
    with mock.patch.object(torch._C, "_cuda_getDeviceCount", return_value=1):
        for name in (*IMPORTS, *worker.IMPORTS):
            import_module(name)
        from torch._inductor.codecache import torch_key
        from triton.runtime.cache import triton_key

        torch_key()
        triton_key()
        worker.remember_help_of_flags()
    assert not torch.cuda.is_initialized()


def main(given: str, output: str) -> None:
    pairs = [(model_type, level) for model_type, level in json.loads(Path(given).read_text())]
    with collector_paused():
        prepare()
    gc.freeze()
    with tempfile.TemporaryDirectory() as folder, open(output, "w") as written:
        for result in sweep(pairs, Path(folder)):
            written.write(json.dumps(asdict(result)) + "\n")
            written.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
