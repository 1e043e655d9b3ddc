"""Trains a stock Hugging Face Llama by Megatron's own trainer on this machine, for ``megasched quickstart``.

Nothing is downloaded: the model is a config with random weights, the corpus is the source of Python's
standard library. Training uses the GPUs; without GPUs, four ranks share the CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasched.errors import ConfigError
from megasched.imports import quiet_imports
from megasched.json_output import print_json
from megasched.launch.quickstart import run_plan, run_report
from megasched.launch.quickstart.corpus import prepare_corpus, write_tokenizer
from megasched.launch.quickstart.run_plan import Plan
from megasched.launch.status.training_log import TrainingLog
from megasched.launch.watched_run import INTERRUPTED, run_watched, tail
from megasched.printing.console import plain_console
from megasched.printing.shell_command import python, shell_command, short_path

if TYPE_CHECKING:
    from rich.console import Console

# Measured on two cores shared with other work: 231 s of training, 2.15 nats per byte in validation.
DEFAULT_ITERS = 300
# In Python, as it is without megasched.
GENERATE = (
    "from transformers import pipeline; "
    'print(pipeline("text-generation", {folder})("import os", max_new_tokens=100)[0]["generated_text"])'
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the quickstart.

    Args:
        argv: arguments after ``megasched quickstart``; the process's own by default.

    Returns:
        0, or the exit code of the failed training run; 130 after Ctrl-C.

    Raises:
        ConfigError: there is no Python source to train on, or matplotlib is missing.
    """
    args = _parser().parse_args(argv)
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("the loss curve is drawn by matplotlib: pip install 'megasched[quickstart]'")
    # What goes on is not what was asked for with --json.
    console = plain_console(stderr=args.json)
    plan = run_plan.detect_plan()
    with quiet_imports():
        run_folder, prepared = _prepare(args, plan, partial(console.print, soft_wrap=True))
    if args.dry_run:
        if args.json:
            print_json(prepared)
        else:
            console.print(prepared["script"], soft_wrap=True)
        return 0
    run_folder.mkdir()
    (run_folder / "train.sh").write_text(prepared["script"])
    code, result = _train(console, plan, run_folder, args.model_schedule, args.iters)
    if result is None:
        return code
    if args.json:
        print_json({**prepared, **result.to_dict()})
    else:
        run_report.print_result(result, console)
    return code


def _prepare(args: argparse.Namespace, plan: Plan, say: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    """Writes corpus and model; returns the folder of the run, which is not made yet, and what is to run."""
    say(f"machine: {plan}")
    folder: Path = args.dir.resolve()
    corpus = prepare_corpus(folder / "data")
    say(f"corpus: {corpus.documents} files of Python's standard library, {corpus.tokens:,} tokens")
    model = folder / "model"
    run_plan.write_model(model)
    write_tokenizer(model)
    say(f"model: {model}/config.json")
    run_folder = _next_run_folder(folder)
    command = run_plan.training_command(
        plan,
        schedule=args.model_schedule,
        model=model,
        corpus_prefix=corpus.prefix,
        cache=corpus.folder / "cache",
        checkpoints=run_folder / "checkpoints",
        iters=args.iters,
    )
    command += ["--allow-unverified"] * args.allow_unverified
    return run_folder, {
        "machine": str(plan),
        "ranks": plan.ranks,
        "layout": asdict(plan.layout),
        "corpus": {"files": corpus.documents, "tokens": corpus.tokens},
        "model": str(model),
        "schedule": args.model_schedule,
        "script": run_plan.shell_script(command, run_plan.rank_environment(plan)),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megasched quickstart",
        description="Train a small stock Llama with Megatron's own trainer on whatever this machine has.",
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path("quickstart"),
        help="folder for data, model and runs (default: %(default)s)",
    )
    parser.add_argument(
        "--iters", type=_positive, default=DEFAULT_ITERS, help="optimizer steps (default: %(default)s)"
    )
    parser.add_argument(
        "--model-schedule",
        default=run_plan.default_schedule(),
        help="schedule file, or `auto` (default: %(default)s)",
    )
    parser.add_argument(
        "--allow-unverified",
        action="store_true",
        help="go on with a newer torch, Megatron or transformers than the tested ones",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="prepare everything, print the command, don't train"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON, and what goes on to standard error"
    )
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _next_run_folder(folder: Path) -> Path:
    """Returns the first of ``run-1``, ``run-2``, ... that does not exist; runs never overwrite each other."""
    return next(path for number in count(1) if not (path := folder / f"run-{number}").exists())


def _train(
    console: Console, plan: Plan, run_folder: Path, schedule: str, iters: int
) -> tuple[int, run_report.Result | None]:
    """Runs the training; returns the exit code, and the result if that is 0."""
    log, log_path = TrainingLog(), run_folder / "train.log"
    start = time.monotonic()
    with run_report.progress(console, f"starting {plan.ranks} ranks", iters) as show:

        def on_line(line: str) -> None:
            if entry := log.read(line):
                show(entry)

        # The very script that the user can run again, so that what it says is what was done.
        command = ["bash", str(run_folder / "train.sh")]
        code = run_watched(command, env=os.environ, log_path=log_path, on_line=on_line)
    if code == INTERRUPTED:
        console.print(f"interrupted; the log so far is in {log_path}", soft_wrap=True)
    elif code:
        console.print(tail(log_path), soft_wrap=True)
        console.print(
            f"training failed with exit code {code}; the whole log: {log_path}", style="red", soft_wrap=True
        )
    if code:
        return code, None
    curve = run_folder / "loss.png"
    run_report.save_loss_curve(log, curve)
    return code, run_report.Result(
        summary=run_report.summarize(log, run_plan.TOKENS_PER_STEP),
        total_seconds=time.monotonic() - start,
        curve=curve,
        checkpoints=run_folder / "checkpoints",
        log=log_path,
        next_commands=_next_commands(plan, run_folder, schedule, iters),
    )


def _next_commands(plan: Plan, run_folder: Path, schedule: str, iters: int) -> list[tuple[str, str]]:
    run, model = short_path(run_folder), short_path(run_folder.parent / "model")
    resume = ["bash", f"{run}/train.sh", "--load", f"{run}/checkpoints", "--train-iters", str(iters + 50)]
    # The learning rate's course is as long as the run, and Megatron asks whether a longer one is meant.
    resume += ["--override-opt-param-scheduler", *run_plan.other_layout_flags(plan)]
    return [
        ("go on from the checkpoint" + ", at another layout" * (plan.ranks > 1), shlex.join(resume)),
        (
            "the trained weights as a Hugging Face folder",
            shell_command("export", "--load", f"{run}/checkpoints", "--output", f"{run}/hf"),
        ),
        (
            "and a text by them",
            shlex.join([python(), "-c", GENERATE.format(folder=json.dumps(f"{run}/hf"))]),
        ),
        (
            "what the schedule does to the model",
            shell_command("show", "--model-schedule", short_path(schedule), "--hf-model", model),
        ),
        (
            "your own model folder: its config and weights instead of random ones; the rest is in train.sh",
            f"{shell_command('launch', 'torchrun')} --gpus-per-node N -- pretrain_gpt.py "
            "--model-schedule mysched.py --hf-model ./MyModel <Megatron's flags>",
        ),
    ]
