"""Runs training steps of a definition in plain transformers and torch: a script, started by its path.

It imports nothing of megasched or Megatron, and refuses to: the reference must not depend on the code that it
judges. It reads names of folders from stdin, a line each, as JSON. A folder holds a job and gets its results:

- ``job.json``: see ``Job``.
- ``batches.safetensors``: arguments of the forward, [steps, micro-batches, ...], and ``labels``, int64
  [steps, micro-batches, b, s] (or [..., b]). A label is what belongs at its position, -100 where it
  does not count.
- ``result.json``: loss and gradient norm of each step, and names.
- A file of safetensors for each kind of tensors: logits of a step, gradients, weights, what modules took and gave.
- ``log``: what was printed, with the traceback of a failure.

Each job runs in a fork, so that it finds transformers imported and nothing that another job has changed. When it
is over, its exit status is printed.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.abc
import json
import math
import os
import signal
import sys
import traceback
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Only as a script: the files beside it, by their own names.
sys.path.insert(0, str(Path(__file__).parent))

import torch
import transformers
from draws import MeanDraws
from loading import Job, load_model
from loss import IGNORED, Labels, labels_of, loss_of
from safetensors.torch import load_file, save_file
from watching import Float64, Sightings, Watch, silence

JUDGED = ("megasched", "megatron")
# What a job imports late, and each fork would anew.
IMPORTS = ("torch._dynamo", "torch.distributed.tensor")


class Barrier(importlib.abc.MetaPathFinder):
    """Keeps megasched and Megatron from being imported in this process."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in JUDGED:
            raise ImportError(f"the reference of `megasched verify` must not import {name}")


@dataclass
class Results:
    """Writes a job's results to its folder: tensors of a kind in one file, as soon as they are known."""

    folder: Path
    numbers: dict[str, Any] = field(default_factory=dict)

    def add(self, kind: str, tensors: dict[str, torch.Tensor]) -> None:
        own = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        save_file(apart(own), self.folder / f"{kind}.safetensors")

    def save(self) -> None:
        (self.folder / "result.json").write_text(json.dumps(self.numbers))


def apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies tensors that share memory, because a file of safetensors holds no memory twice."""
    met: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        found[name] = (
            tensor.clone() if address in met or tensor.untyped_storage().nbytes() != tensor.nbytes else tensor
        )
        met.add(address)
    return found


# steps -----------------------------------------------------------------------------------------------


def exactly(job: Job) -> AbstractContextManager[Any]:
    return Float64() if job.dtype == "float64" else nullcontext()


def step(
    model: Any, job: Job, batches: list[Any], number: int, results: Results, *, takes: Labels
) -> Sightings | None:
    """Runs forward and backward of one global batch; unless rounded, gradients stay on the parameters.

    Each micro-batch has the same weight in the gradient, as Megatron has it, and each label in the reported loss.
    Returns what modules took and gave; None where no micro-batch of this step is watched.
    """
    watch, seen = None, None
    model.zero_grad(set_to_none=True)
    losses, counts, outputs = [], [], {}
    sums: dict[str, torch.Tensor] = {}
    for place, (inputs, labels) in enumerate(batches):
        if (number, place) == (job.look_step, job.look_batch):
            watch = Watch(model, [path for path, _ in model.named_modules() if path])
        with exactly(job):
            loss, logits = loss_of(model, inputs, labels, takes)
        if watch is not None:
            seen, watch = watch.close(), None
        (loss / len(batches)).backward()
        if job.rounded:
            add_up(model, sums)
        losses.append(float(loss.detach()))
        counts.append(int((labels != IGNORED).sum()))
        outputs[str(place)] = logits.detach()
    results.add(f"logits{number}", outputs)
    whole = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    results.numbers.setdefault("losses", []).append(whole)
    gradients = gradients_of(model) if not job.rounded else sums
    norm = torch.stack([gradient.norm(dtype=torch.float64) for gradient in gradients.values()]).norm().item()
    results.numbers.setdefault("grad_norms", []).append(norm)
    if number == job.look_step:
        results.add("gradient", gradients)
    return seen


def validate(model: Any, job: Job, batches: list[Any], *, takes: Labels) -> float:
    """Returns the loss of a global batch as an evaluation has it, each label with the same weight."""
    model.eval()
    whole, counted = 0.0, 0
    with torch.no_grad(), exactly(job):
        for inputs, labels in batches:
            count = int((labels != IGNORED).sum())
            whole += float(loss_of(model, inputs, labels, takes)[0]) * count
            counted += count
    model.train()
    return whole / counted


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    """Returns the gradients by name; zeros for a parameter that is not used."""
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def add_up(model: Any, sums: dict[str, torch.Tensor]) -> None:
    """Adds 16-bit gradients up in float64, unrounded as in a trainer's float32 buffers, and clears them."""
    for name, gradient in gradients_of(model).items():
        sums[name] = sums[name] + gradient if name in sums else gradient.double()
    model.zero_grad(set_to_none=True)


def make_optimizer(model: Any, options: dict[str, Any]) -> torch.optim.Optimizer:
    """Returns torch's AdamW without decay for biases, parameters of norms and those of one dimension."""
    decayed, spared = [], []
    for module in model.modules():
        norm = "norm" in type(module).__name__.lower() and not list(module.children())
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and not any(parameter is other for other in (*decayed, *spared)):
                free = norm or name.endswith("bias") or parameter.dim() == 1
                (spared if free else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": options["weight_decay"]},
        {"params": spared, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=options["lr"],
        betas=tuple(options["betas"]),
        eps=options["eps"],
    )


def reached(model: Any, before: dict[str, Any]) -> dict[str, Any]:
    """Maps each parameter to whether it has had a gradient: a list with an entry per stacked matrix (expert)."""
    found = dict(before)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or not parameter.numel():
            continue
        stacked = parameter.dim() == 3
        none = [False] * parameter.shape[0] if stacked else [False]
        now = none
        if parameter.grad is not None:
            parts = parameter.grad.flatten(1) if stacked else parameter.grad.reshape(1, -1)
            now = [bool(one) for one in parts.abs().amax(dim=1) > 0]
        found[name] = [one or other for one, other in zip(found.get(name, none), now, strict=True)]
    return found


def batches_of(job: Job, folder: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Returns the forward's arguments and the labels of all steps; those that are no ids in the model's dtype."""
    inputs = load_file(folder / "batches.safetensors")
    labels = inputs.pop("labels")
    for name, value in inputs.items():
        if value.is_floating_point():
            loaded = value.to(torch.bfloat16) if job.rounded else value
            inputs[name] = loaded.to(getattr(torch, job.dtype))
    return inputs, labels


def run(job: Job, folder: Path) -> Results:
    """Runs all steps of a job; a rounded job ends after the first one."""
    results = Results(folder)
    model = load_model(job, folder)
    results.numbers["silenced"] = silence(model) if job.silent else []
    drawing = MeanDraws()
    inputs, labels = batches_of(job, folder)
    optimizer = make_optimizer(model, job.optimizer)
    parameters = dict(model.named_parameters())
    start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    met: dict[str, Any] = {}
    with exactly(job):
        takes = labels_of(model, inputs["input_ids"][0, 0]) if job.predicts_next else Labels(moved=False)
    batches = [
        [
            ({name: values[number, place] for name, values in inputs.items()}, own)
            for place, own in enumerate(of_step)
        ]
        for number, of_step in enumerate(labels)
    ]
    for number, micro_batches in enumerate(batches):
        if number == job.look_step > 0:
            results.add("before", parameters)
        with drawing if job.silent else nullcontext():
            seen = step(model, job, micro_batches, number, results, takes=takes)
        if seen is not None:
            note_sightings(seen, results)
        if job.rounded:
            break  # 16 bits are judged by their gradients
        met = reached(model, met)
        torch.nn.utils.clip_grad_norm_([p for p in parameters.values() if p.requires_grad], job.optimizer["clip"])
        optimizer.step()
    results.numbers["changes"] = {
        name: float((p.detach() - start[name]).abs().max()) if p.numel() else 0.0 for name, p in parameters.items()
    }
    results.add("weight", parameters)
    results.add("buffer", {name: value for name, value in model.named_buffers() if value.is_floating_point()})
    results.numbers["unreached"] = [
        name if len(parts) == 1 or not any(parts) else f"{name}[{index}]"
        for name, parts in met.items()
        for index, part in enumerate(parts)
        if not part and (index == 0 or any(parts))
    ]
    results.numbers["drawn"] = drawing.drawn
    results.numbers["validation"] = None if job.rounded else validate(model, job, batches[0], takes=takes)
    return results


def note_sightings(seen: Sightings, results: Results) -> None:
    results.numbers["order"] = seen.order
    results.numbers["sources"] = seen.sources
    for kind, values in (("value", seen.values), ("value_gradient", seen.gradients)):
        results.add(kind, {f"{side}/{path}": tensor for (path, side), tensor in values.items()})


# the process -----------------------------------------------------------------------------------------


def do(folder: Path) -> None:
    """Runs one job, in a fork."""
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    results = run(Job(**json.loads((folder / "job.json").read_text())), folder)
    if judged := [name for name in sys.modules if name.partition(".")[0] in JUDGED]:
        raise RuntimeError(f"the reference has imported what it is to judge: {judged[:4]}")
    if not all(math.isfinite(loss) for loss in results.numbers["losses"]):
        raise RuntimeError(f"the definition's own loss is not finite: {results.numbers['losses']}")
    results.save()


def main() -> None:
    """Runs jobs until stdin ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no life after whoever started it
    sys.meta_path.insert(0, Barrier())
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in IMPORTS:
        importlib.import_module(name)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        folder = Path(json.loads(line))
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)
                do(folder)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        print(json.dumps({"status": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}), flush=True)


if __name__ == "__main__":
    main()
