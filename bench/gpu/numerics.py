"""Every level's numbers on a GPU: a step of Megatron's trainer against plain Hugging Face in float64.

The yardstick is plain Hugging Face's own error in bf16 on the same GPU, as in ``megasched/verify/bfloat16.py``. In
8 bits it is that of Megatron's own layers, which is level block, by the same recipe. A case is
FAMILY:LEVEL[:RECIPE]. One line of JSON a case is printed and written at once; what is written is not run again. A
process has many cases, and another one goes on after a failure, which may have broken the GPU's context. The host
is slower than the GPU: several processes share the families.

    python bench/gpu/numerics.py FOLDER [--te] [--cases llama:block:tensorwise ...] [--processes N]
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from common import ROOT
from one_rank import one_rank

from megasched.files import write_whole

# Those whose layers Megatron's can stand for, and those without.
BLOCKS = ("llama", "qwen3", "gemma3_text", "gpt2", "phi3", "mixtral", "gpt_oss", "deepseek_v3")
WITHOUT = ("gemma2",)
IN_8_BITS = ("llama", "mixtral")
RECIPES = ("delayed", "tensorwise", "blockwise")
# Large enough for the kernels of large models: products of whole tiles, heads that fused attention takes.
SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
HEADS = {"num_key_value_heads": 2, "head_dim": 64}  # of other than latent attention, which has sizes of its own
LENGTH, BATCH, TOKENS = 256, 2, (10, 490)
# How far from float64 logits, and all gradients together, may be, in multiples of the yardstick. On CPUs at most
# 1.06 was measured, on an H200 1.3, and 1.6 of a mixture where plain Hugging Face ran but once
# (results/gpu_numerics_h200.json).
LIMIT = 1.5
# A yardstick that is longer measures nothing: bf16 rounds by 2^-9, and some tokens go to other experts by that. An
# 8-bit product has 4 bits less in its operands, in its gradients 5: on an H200 Megatron's own came to 0.11, 0.25.
LONGEST, LONGEST_8_BITS = 0.25, 0.5
RESULTS, LOCK = "cases.json", "cases.lock"
CORES_OF_A_PROCESS = 4


def cases(te: bool) -> list[str]:
    """All cases, those with recipes for 8 bits where there is Transformer Engine."""
    found = [f"{family}:{level}" for family in (*BLOCKS, *WITHOUT) for level in ("leaf", "fused")]
    found += [f"{family}:block" for family in BLOCKS]
    recipes = RECIPES if te else ()
    # The yardstick first.
    return found + [f"{f}:{level}:{r}" for f in IN_8_BITS for level in ("block", "fused") for r in recipes]


def read(folder: Path) -> dict[str, Any]:
    """The results so far, by case."""
    path = folder / RESULTS
    return json.loads(path.read_text()) if path.exists() else {}


def note(folder: Path, case: str, result: dict[str, Any]) -> None:
    """Writes a result at once, beside those of other processes."""
    print(json.dumps({"case": case, **result}), flush=True)
    with (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of this open file: let go when it is closed
        write_whole(folder / RESULTS, [json.dumps({**read(folder), case: result}, indent=1), "\n"])


def shared_out(chosen: Sequence[str], processes: int) -> list[list[str]]:
    """Cases for each process; those of one family stay together, which have their references in common."""
    shares: list[list[str]] = [[] for _ in range(processes)]
    of_family: dict[str, list[str]] = {}
    for case in chosen:
        of_family.setdefault(case.split(":")[0], []).append(case)
    for cases_of_it in sorted(of_family.values(), key=len, reverse=True):
        min(shares, key=len).extend(cases_of_it)
    return [share for share in shares if share]


def run_all(folder: Path, chosen: Sequence[str], options: Sequence[str], processes: int = 1) -> bool:
    """Runs what has no result yet in processes of its own; returns whether every case passes."""
    shares = shared_out(chosen, processes)
    with ThreadPoolExecutor(len(shares)) as threads:
        list(threads.map(lambda share: run_share(folder, share, options), shares))
    return all(read(folder)[case]["outcome"] == "passed" for case in chosen)


def run_share(folder: Path, chosen: Sequence[str], options: Sequence[str]) -> None:
    """Runs what has no result yet of these cases, by one process after the other."""
    while left := [case for case in chosen if case not in read(folder)]:
        log = folder / f"worker_{chosen[0].split(':')[0]}.log"
        before = log.stat().st_size if log.exists() else 0
        with log.open("ab") as output:
            command = [sys.executable, __file__, str(folder), "--worker", *options, "--cases", *left]
            code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
        said = log.read_bytes()[before:].decode(errors="replace").splitlines()
        for line in said:
            if line.startswith('{"case"'):
                print(line, flush=True)
        if left[0] not in read(folder):  # it has not come to its end, not even to that of one case
            note(folder, left[0], {"outcome": "died", "why": f"exit status {code}", "log": said[-12:]})


def work(folder: Path, chosen: Sequence[str], te: bool) -> None:
    """Runs cases in this process, up to the first that fails."""
    from megasched.errors import MegaschedError
    from megasched.trainer.flags.rehearsal import without_kernel_packages

    if not te:
        without_kernel_packages()
    references: dict[str, Any] = {}
    for case in chosen:
        start = time.monotonic()
        try:
            result = compare(case, references, read(folder))
        except MegaschedError as error:
            result = {"outcome": "refused", "why": str(error)}
        except Exception as error:
            result = {"outcome": "failed", "why": f"{type(error).__name__}: {error}"}
            traceback.print_exc()
        note(folder, case, {**result, "seconds": round(time.monotonic() - start, 1)})
        if result["outcome"] == "failed":
            return


def small_model(family: str, folder: str) -> None:
    """Writes the ``config.json`` of a family in sizes that kernels of large models take."""
    from megasched.definition.small_models.small_models import small_config

    config = small_config(family)
    for name, value in {**SIZES, **({} if hasattr(config, "kv_lora_rank") else HEADS)}.items():
        if hasattr(config, name):
            setattr(config, name, value)
    config.save_pretrained(folder)


def compare(case: str, references: dict[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """One step of the trainer, and its errors beside the yardstick.

    Args:
        references: steps of plain Hugging Face by family, in float64 and in bf16; filled in.
        before: the results so far, by case.
    """
    import torch
    from rounded_step import rounded_step

    from megasched.verify import trainer_run
    from megasched.verify.ranks.pool import FOLDER
    from megasched.verify.ranks.worker import reset_megatron
    from megasched.verify.reference import IGNORED

    family, level, recipe = [*case.split(":"), ""][:3]
    os.environ.update(one_rank())
    called: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        small_model(family, folder)
        schedule = f"{ROOT / 'bench' / 'levels.py'}:{level}"
        try:
            with counting(called):
                report = trainer_run.train(
                    folder, flags(recipe), iterations=1, schedule=schedule, tokens=TOKENS, rehearse=False
                )
        finally:
            reset_megatron()
            torch.cuda.empty_cache()
        batches = trainer_run.batches_of([report])
        for _, labels in batches:
            labels[:, -1] = IGNORED  # as it is; a ghost GPU has not computed it
        if family not in references:
            references[family] = [
                rounded_step(folder, batches, dtype, device="cuda", eager=eager)
                for dtype, eager in ((torch.float64, False), (torch.bfloat16, False), (torch.bfloat16, True))
            ]
    exact, *plain = references[family]
    ours = trainer_run.gather([report], "gradients", 1)
    found = {
        "loss": [trainer_run.losses([report])[0], plain[0].loss, exact.loss],
        "missing": sorted(exact.gradients.keys() - ours.keys()),
        # Which attention and which linears it was, kernels of Transformer Engine among them.
        "modules": dict(sorted(called.items())),
    }
    mine = errors(trainer_run.logits_of([report]), ours, exact)
    theirs = [errors(step.logits, step.gradients, exact) for step in plain]
    if recipe:
        block = mine if level == "block" else before.get(f"{family}:block:{recipe}", {}).get("errors")
        theirs = [block] if block else []
    result = judged(mine, theirs, LONGEST_8_BITS if recipe else LONGEST)
    return {**result, **found, **({"outcome": "wrong"} if found["missing"] else {}), "errors": mine}


@contextmanager
def counting(called: Counter[str]) -> Iterator[None]:
    """Counts the modules that a step calls, by the name of their class."""
    from megatron.training import training
    from torch.nn.modules.module import register_module_forward_pre_hook

    from megasched.trainer import entry

    entry.apply_patches()  # first: they look at the function that is wrapped here
    real = training.train_step

    def train_step(*args: Any, **kwargs: Any) -> Any:  # no plan is made any more, which refuses such a hook
        hook = register_module_forward_pre_hook(lambda module, given: called.update([type(module).__name__]))
        try:
            return real(*args, **kwargs)
        finally:
            hook.remove()

    with mock.patch.object(training, "train_step", train_step):
        yield


def flags(recipe: str) -> list[str]:
    """Megatron's, of one step in bf16 or in 8 bits."""
    batch, vocabulary = str(BATCH), str(SIZES["vocab_size"])
    found = ["--bf16", "--no-gradient-accumulation-fusion", "--num-workers", "0", "--seq-length", str(LENGTH)]
    found += ["--micro-batch-size", batch, "--global-batch-size", batch, "--vocab-size", vocabulary]
    return [*found, "--fp8-format", "hybrid", "--fp8-recipe", recipe] if recipe else found


def errors(logits: Sequence[Any], gradients: Mapping[str, Any], exact: Any) -> dict[str, Any]:
    """How far logits, all gradients together, and each of them are from float64, as parts of the exact ones."""
    single = {
        name: _error([gradients[name]], [exact.gradients[name]]) for name in exact.gradients if name in gradients
    }
    together = _error([gradients[name] for name in single], [exact.gradients[name] for name in single])
    return {"logits": _error(logits, exact.logits), "gradients": together, "single": single}


def judged(mine: Mapping[str, Any], yardsticks: Sequence[Mapping[str, Any]], longest: float) -> dict[str, Any]:
    """The verdict of a case by its errors; pairs are (ours, the yardstick's).

    Args:
        yardsticks: errors of others. The largest counts: which tokens go to other experts is chance.
        longest: what a yardstick may be at most.
    """
    if not yardsticks:
        return {"outcome": "failed", "why": "its yardstick, level block, has no result"}
    pairs = {what: [mine[what], max(one[what] for one in yardsticks)] for what in ("logits", "gradients")}
    theirs = {name: max(one["single"].get(name, 0.0) for one in yardsticks) for name in mine["single"]}
    worst = max(theirs, key=lambda name: mine["single"][name] / max(theirs[name], 2.0**-8))
    passed = all(theirs < longest and ours <= LIMIT * theirs for ours, theirs in pairs.values())
    verdict = {"outcome": "passed" if passed else "wrong", "limit": LIMIT}
    return {**verdict, **pairs, "worst": [worst, mine["single"][worst], theirs[worst]]}


def _error(got: Sequence[Any], exact: Sequence[Any]) -> float:
    """The norm of a difference of tensors, over that of the exact ones; 1 where those are zeros."""
    pairs = zip(got, exact, strict=True)
    off = sum(float((mine.double() - wanted.double()).norm()) ** 2 for mine, wanted in pairs)
    size = sum(float(wanted.double().norm()) ** 2 for wanted in exact)
    return (off / size) ** 0.5 if size else 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--te", action="store_true", help="with Transformer Engine, in 8 bits too")
    parser.add_argument("--cases", nargs="+", metavar="FAMILY:LEVEL[:RECIPE]")
    most = max(1, (os.cpu_count() or 1) // CORES_OF_A_PROCESS)
    parser.add_argument("--processes", type=int, default=most, help="at a time")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    chosen = options.cases or cases(options.te)
    if options.worker:
        work(options.folder, chosen, options.te)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # process groups and threads are nobody's business any more
    options.folder.mkdir(parents=True, exist_ok=True)
    return int(not run_all(options.folder, chosen, ["--te"] if options.te else [], options.processes))


if __name__ == "__main__":
    sys.exit(main())
