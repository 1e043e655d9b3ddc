"""Runs ``megasched plan``: finds the layouts that fit a job, fastest first, as flags of Megatron's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from megasched.errors import ConfigError
from megasched.language.parallel_dims import Fp8, ParallelDims
from megasched.planner.hardware.hardware import GIB, load_hardware
from megasched.planner.memory import ERROR
from megasched.planner.predict import refuse_8_bits
from megasched.planner.search import STATIC, Candidate, Job, search
from megasched.printing.shell_command import program
from megasched.trainer.evidence.compatibility import model_words
from megasched.trainer.session import Session, open_session


@dataclass(frozen=True)
class PlanReport:
    """Holds the results of a search.

    Attributes:
        fitting: candidates that can be run, fastest first.
        out: candidates that can't.
        model_words: flags that say of the model more than its folder.
    """

    job: Job
    hf_model: str
    schedule: str
    fitting: list[Candidate]
    out: list[Candidate]
    model_words: list[str] = field(default_factory=list)

    def ranked(self) -> list[Candidate]:
        """Returns the fastest of each TP, PP, CP and EP; others differ in micro-batch, chunks or recompute."""
        first: dict[tuple[int, ...], Candidate] = {}
        for one in self.fitting:
            layout = one.layout
            first.setdefault((layout.tp, layout.pp, layout.cp, layout.ep), one)
        return list(first.values())

    def tokens_per_second(self, candidate: Candidate) -> float:
        """Returns the tokens per second of one GPU."""
        assert candidate.time is not None
        return self.job.global_batch_size * self.job.sequence_length / candidate.time.total / self.job.gpus

    def reasons(self) -> list[tuple[str, int]]:
        """Returns the reasons why layouts are out, with the number of each; memory is one reason."""
        found = Counter(self._memory_reason if one.lacking else one.why_out for one in self.out)
        return found.most_common()

    @cached_property
    def _memory_reason(self) -> str:
        """Returns by how much memory is short at the least, and the flags that make it do."""
        nearest = min((one for one in self.out if one.lacking), key=lambda one: one.lacking)
        flags = ["--grad-reduce-in-bf16"] if self.job.gradient_dtype == torch.float32 else []
        if not nearest.why_out.startswith(STATIC):  # activations are what is cut then
            flags += [f"--max-cp {2 * self.job.largest_context}", "a smaller --seq-length"]
        flags.append("more --gpus")
        lacking = f"{nearest.lacking / GIB:.2f} GiB at {replace(nearest.layout, fp8=None)}"
        return f"more memory than there is, at the least {lacking}; what helps: {', '.join(flags)}"

    def is_tight(self, candidate: Candidate) -> bool:
        """Returns whether a candidate fits by less than a prediction of memory may be off."""
        return candidate.fullest.total * (1 + ERROR) > self.job.hardware.usable_bytes

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data for JSON, in the form that ``megasched tune --warm-start`` reads."""
        return {
            "model": self.hf_model,
            "gpu": self.job.hardware.name,
            "gpus": self.job.gpus,
            "sequence_length": self.job.sequence_length,
            "global_batch_size": self.job.global_batch_size,
            "layouts": [self._one(candidate) for candidate in self.fitting],
            "out": [
                {"layout": str(one.layout), "why": one.why_out, "lacking_bytes": one.lacking} for one in self.out
            ],
        }

    def _one(self, candidate: Candidate) -> dict[str, Any]:
        assert candidate.time is not None
        layout = candidate.layout
        names = ("tensor_model_parallel_size", "sequence_parallel", "pipeline_model_parallel_size")
        names += ("context_parallel_size", "expert_model_parallel_size", "micro_batch_size")
        flags = {name: getattr(layout, name) for name in names}
        if layout.vpp > 1:
            flags["num_virtual_stages_per_pipeline_rank"] = layout.vpp
        if candidate.recompute_granularity is not None:
            words = recompute_words(candidate)
            flags |= {
                name.strip("-").replace("-", "_"): int(value) if value.isdecimal() else value
                for name, value in zip(words[::2], words[1::2], strict=True)
            }
        return {
            "flags": flags,
            "data_parallel_size": layout.data_parallel_size,
            "step_seconds": candidate.time.total,
            "seconds": candidate.time.parts,
            "tokens_per_second_per_gpu": self.tokens_per_second(candidate),
            "tight": self.is_tight(candidate),
            "memory_bytes": [{**asdict(memory), "total": memory.total} for memory in candidate.memory],
        }


def plan(
    hf_model: str,
    *,
    gpus: int,
    gpu: str,
    sequence_length: int,
    global_batch_size: int,
    schedule: str = "auto",
    fp8_recipe: str | None = None,
    grad_reduce_in_bf16: bool = False,
    largest_context: int = 1,
    overrides: list[str] | None = None,
    trust_remote_code: bool = False,
    adapter: str | None = None,
    on_group: Callable[[ParallelDims], Any] = lambda layout: None,
) -> PlanReport:
    """Searches the layouts of a job.

    Args:
        hf_model: only its config is read.
        gpu: a known type, or a TOML file.
        fp8_recipe: recipe of 8-bit training; None for bf16.
        grad_reduce_in_bf16: sum and send gradients in bf16.
        largest_context: largest CP of the layouts that are looked at.
        adapter: the value of ``--adapter``.
        on_group: called with TP, CP and EP of the layouts that come next.

    Raises:
        ConfigError: an argument can't be used as given.
    """
    hardware = load_hardware(gpu)
    if gpus > hardware.gpus_per_node and gpus % hardware.gpus_per_node:
        raise ConfigError(
            f"--gpus {gpus}: a node of {hardware.name} has {hardware.gpus_per_node}; give whole nodes"
        )
    refuse_8_bits(hardware, fp8_recipe)
    asked: dict[str, Any] = {
        "overrides": overrides or (),
        "trust_remote_code": trust_remote_code,
        "adapter": adapter,
    }
    job = Job(
        _opened_sessions(hf_model, schedule, sequence_length, asked),
        hardware,
        gpus,
        sequence_length,
        global_batch_size,
        gradient_dtype=torch.bfloat16 if grad_reduce_in_bf16 else torch.float32,
        fp8=None if fp8_recipe is None else Fp8(fp8_recipe=fp8_recipe),
        largest_context=largest_context,
    )
    found = search(job, on_group=on_group)
    if not found:
        raise ConfigError(
            f"--gpus {gpus} --global-batch-size {global_batch_size} --seq-length {sequence_length}: no layout "
            "divides the batch and the sequence evenly"
        )
    fitting, out = [c for c in found if not c.why_out], [c for c in found if c.why_out]
    return PlanReport(job, hf_model, schedule, fitting, out, model_words(**asked))


def _opened_sessions(
    hf_model: str, schedule: str, sequence_length: int, asked: Mapping[str, Any]
) -> Callable[[ParallelDims], Session]:
    """Returns a function from layouts to sessions.

    It opens one session with CP and one without, when the first layout of that kind is asked for; other layouts
    share what these know of the model.

    Args:
        asked: further arguments of ``open_session``.
    """
    opened: dict[bool, Session] = {}

    def session_for(layout: ParallelDims) -> Session:
        splits = layout.cp > 1
        if splits in opened:
            return opened[splits].with_layout(layout)
        opened[splits] = open_session(schedule, hf_model, layout, **asked)
        opened[splits].freeze_unreached(1, sequence_length)
        return opened[splits]

    return session_for


def recompute_words(candidate: Candidate) -> list[str]:
    """Returns Megatron's flags for the recompute of a candidate; empty where it has none."""
    if candidate.recompute_granularity is None:
        return []
    count = candidate.recompute_num_layers
    method, each = ("uniform", 1) if count is None else ("block", count)
    words = ["--recompute-granularity", candidate.recompute_granularity]
    return [*words, "--recompute-method", method, "--recompute-num-layers", str(each)]


def run_words(report: PlanReport, candidate: Candidate) -> list[str]:
    """Returns the flags of a candidate, as words of a command line."""
    layout, job = candidate.layout, report.job
    words = layout.flags()
    words += ["--micro-batch-size", str(layout.micro_batch_size)]
    words += ["--global-batch-size", str(job.global_batch_size)]
    words += ["--seq-length", str(job.sequence_length), "--bf16", *recompute_words(candidate)]
    if layout.fp8 is not None:
        words += ["--fp8-format", "hybrid", "--fp8-recipe", layout.fp8.fp8_recipe]
    if layout.tp_comm_overlap:
        words.append("--tp-comm-overlap")
    if job.gradient_dtype == torch.bfloat16:
        words.append("--grad-reduce-in-bf16")
    # Ranks of TP may hold the same experts without DP.
    if max(layout.cp * layout.data_parallel_size, layout.ep > 1 and layout.expert_data_parallel_size) > 1:
        words += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    return words


def slurm_words(report: PlanReport, candidate: Candidate) -> list[str]:
    """Returns the command that submits a candidate to Slurm, without data, learning rate, and where to save."""
    job = report.job
    each = min(job.gpus, job.hardware.gpus_per_node)
    launch = [*program(), "launch", "slurm", "--nodes", str(job.gpus // each), "--gpus-per-node", str(each)]
    script = ["pretrain_gpt.py", "--model-schedule", report.schedule, "--hf-model", report.hf_model]
    return [*launch, "--", *script, *report.model_words, *run_words(report, candidate)]
