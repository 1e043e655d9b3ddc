"""Runs the plain reference, ``plain/reference.py``: hands it jobs and reads its results."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from megasched.verify.plain import SCRIPT
from megasched.verify.plain.watching import Sightings

START_SECONDS = 300
# As trainer_run.RUN_FLAGS and STEP_FLAGS have them.
OPTIMIZER = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-4, "weight_decay": 0.1, "clip": 1.0}


class PlainError(RuntimeError):
    """Reports that the reference could not be computed, with the end of its log."""


@dataclass(frozen=True)
class Batches:
    """Holds global batches, one a step.

    Attributes:
        inputs: argument of the forward -> [steps, micro-batches, ...], e.g. ``input_ids``, int64, of [b, s].
        labels: int64 [steps, micro-batches, b, s] (or [..., b]); what belongs at each position, -100 where it does
            not count.
    """

    inputs: Mapping[str, torch.Tensor]
    labels: torch.Tensor

    @property
    def steps(self) -> int:
        return len(self.labels)

    @property
    def micro_batches(self) -> int:
        """Returns how many micro-batches a step has."""
        return self.labels.shape[1]

    def first(self, steps: int) -> Batches:
        """Returns the batches of the first steps."""
        inputs = {name: values[:steps].clone() for name, values in self.inputs.items()}
        return Batches(inputs, self.labels[:steps].clone())

    def save(self, path: Path) -> None:
        save_file({**self.inputs, "labels": self.labels}, path)


@dataclass(frozen=True)
class PlainModel:
    """Describes the model to run; see ``Job`` in ``plain/loading.py``."""

    model: str
    weights: str | None
    auto_class: str = "AutoModelForCausalLM"
    predicts_next: bool = True
    trust_remote_code: bool = False
    silent: bool = False
    adapters: tuple[tuple[str, float], ...] = ()  # path and scaling
    unfrozen: tuple[str, ...] = ()
    adapter_weights: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class PlainRun:
    """Holds what plain transformers computed.

    Attributes:
        losses, grad_norms: loss and gradient norm of each step.
        validation: loss of the first step's batch in an evaluation after the last one; None of a rounded run.
        logits: [b, s, v] of each micro-batch of each step.
        gradients: gradients by parameter name, of the step that was looked at.
        before: weights before that step; empty where it is the first one.
        weights, buffers: values after the last step.
        changes: largest change of each parameter over all steps.
        sightings: what was seen in the micro-batch that was looked at.
        unreached: parameters (and entries of stacked ones) that no step has given a gradient to.
        silenced: modules whose dropout was on.
        drawn: whether code drew random numbers, whose mean it was given.
    """

    losses: list[float]
    grad_norms: list[float]
    logits: list[list[torch.Tensor]]
    gradients: dict[str, torch.Tensor]
    before: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    changes: dict[str, float]
    sightings: Sightings
    unreached: list[str]
    silenced: list[str]
    drawn: bool = False
    validation: float | None = None


class PlainProcess:
    """Starts the script when it is first needed, and keeps it running until ``close``."""

    def __init__(self, folder: Path) -> None:
        """Sets the folder for the files of jobs; starts nothing yet."""
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def run(
        self,
        given: PlainModel,
        batches: Batches,
        *,
        dtype: str = "float32",
        rounded: bool = False,
        draw: int = 0,
        look: tuple[int, int] = (0, 0),
        optimizer: Mapping[str, Any] = OPTIMIZER,
        timeout: float = 600,
    ) -> PlainRun:
        """Runs all steps of the batches and returns what plain transformers computed.

        Args:
            draw: of ``nudge`` in ``plain/loading.py``.
            look: step and micro-batch in which modules are watched.

        Raises:
            PlainError: it failed, or took longer than ``timeout`` seconds.
        """
        with tempfile.TemporaryDirectory(dir=self._folder, prefix="job") as name:
            folder = Path(name)
            batches.save(folder / "batches.safetensors")
            if given.adapter_weights:
                save_file(dict(given.adapter_weights), folder / "adapters.safetensors")
            job = {
                **{name: value for name, value in vars(given).items() if name != "adapter_weights"},
                "dtype": dtype,
                "rounded": rounded,
                "draw": draw,
                "look_step": look[0],
                "look_batch": look[1],
                "optimizer": dict(optimizer),
            }
            (folder / "job.json").write_text(json.dumps(job))
            self._do(folder, timeout)
            return _read(folder)

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _do(self, folder: Path, timeout: float) -> None:
        process = self._started()
        assert process.stdin is not None
        process.stdin.write(json.dumps(str(folder)) + "\n")
        process.stdin.flush()
        status = self._answer(process, timeout)
        if status.get("status") == 0:
            return
        log = folder / "log"
        told = log.read_text(errors="replace")[-4000:] if log.is_file() else ""
        if "status" not in status:
            self.close()
            told = f"no end after {timeout:g} s\n{told}"
        raise PlainError(f"the reference, plain transformers in a process of its own, failed:\n{told}")

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            errors = (self._folder / "reference.log").open("ab")
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path for path in dict.fromkeys(sys.path) if path),
                    "OMP_NUM_THREADS": "1",
                    "CUDA_VISIBLE_DEVICES": "",
                },
            )
            errors.close()
            if not self._answer(self._process, START_SECONDS):
                self.close()
                told = (self._folder / "reference.log").read_text(errors="replace")[-4000:]
                raise PlainError(f"the reference did not start:\n{told}")
        return self._process

    @staticmethod
    def _answer(process: subprocess.Popen[str], timeout: float) -> dict[str, Any]:
        """Returns the process's next line, as JSON; empty where it has died or does not answer in time."""
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], timeout)[0]:
            return {}
        found: dict[str, Any] = json.loads(process.stdout.readline() or "{}")
        return found


def _read(folder: Path) -> PlainRun:
    numbers = json.loads((folder / "result.json").read_text())

    def tensors(kind: str) -> dict[str, torch.Tensor]:
        path = folder / f"{kind}.safetensors"
        return load_file(path) if path.is_file() else {}

    seen = Sightings(order=[(path, side) for path, side in numbers["order"]], sources=numbers["sources"])
    for kind, target in (("value", seen.values), ("value_gradient", seen.gradients)):
        for name, tensor in tensors(kind).items():
            side, _, path = name.partition("/")
            target[path, side] = tensor  # type: ignore[index]
    logits = [tensors(f"logits{number}") for number in range(len(numbers["losses"]))]
    return PlainRun(
        losses=numbers["losses"],
        grad_norms=numbers["grad_norms"],
        logits=[[of_step[str(place)] for place in range(len(of_step))] for of_step in logits],
        gradients=tensors("gradient"),
        before=tensors("before"),
        weights=tensors("weight"),
        buffers=tensors("buffer"),
        changes=numbers["changes"],
        sightings=seen,
        unreached=numbers["unreached"],
        silenced=numbers["silenced"],
        drawn=numbers["drawn"],
        validation=numbers["validation"],
    )
