"""Adapts a Megatron command line to a machine without a GPU, and says which flags it changes and why.

``megasched.patches.host_cuda`` emulates the device; the flags here choose the paths of Megatron that exist on a
CPU. Everything else stays as it will run on the cluster, ``--bf16`` and ``--fp16`` included.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from megasched.errors import ConfigError

ENVIRONMENT = "MEGASCHED_REHEARSE"

# Flags with one value -> the value for a CPU, and why another one can't run; one without a reason can,
# and stays if it was given.
VALUES = {
    "--distributed-backend": ("gloo", "NCCL needs GPUs"),
    "--transformer-impl": ("local", "Transformer Engine needs a GPU"),
    "--async-strategy": ("mcore", "NVIDIA's package for the other one needs GPUs"),
    "--rerun-mode": ("disabled", "it replays steps with the GPU's random state"),
    # Data loading processes compete with the ranks for the cores.
    "--num-workers": ("0", ""),
}

# Flag of these -> the one without which it says nothing, and is not added.
_BESIDE = {"--async-strategy": "--async-save"}

# Megatron takes this module of --recompute-modules beside that flag alone, which goes; the last one includes it.
_GROUPED, _OF_GROUPED, _INSTEAD = "--moe-grouped-gemm", "moe_act", "moe"

# Flags that switch off a kernel: added where they are missing.
SWITCHES = (
    "--use-cpu-initialization",
    "--no-gradient-accumulation-fusion",
    "--no-persist-layer-norm",
    "--no-masked-softmax-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-dropout-fusion",
    "--no-rope-fusion",
)

_TE = "it needs Transformer Engine, which needs a GPU"
_CUDA_GRAPHS = "there are no CUDA graphs on a CPU"
_KERNEL = "it is a GPU kernel"
_EXPERTS_SENT = "tokens go to their experts by all-to-all here"
_PINNED = "there is no device memory to offload from"
_PROFILER = "it measures a GPU"

# Flags (shell patterns) that can't run on a CPU, and why; their values go with them.
DROPPED = {
    "--fp8-*": "8-bit kernels need a GPU",
    "--no-fp8-*": "8-bit kernels need a GPU",
    "--disable-fp8-*": "8-bit kernels need a GPU",
    "--fp4-*": "4-bit kernels need a GPU",
    "--attention-backend": "flash and fused attention are GPU kernels",
    "--flash-attention-version": "flash attention is a GPU kernel",
    "--use-flash-attn": "flash attention is a GPU kernel",
    "--tp-comm-overlap": _TE,
    "--tp-comm-overlap-*": _TE,
    "--use-transformer-engine-op-fuser": _TE,
    "--use-te-activation-func": _TE,
    "--te-rng-tracker": _TE,
    "--te-precision-config-file": _TE,
    "--use-precision-aware-optimizer": _TE,
    "--main-grads-dtype": "it goes with --use-precision-aware-optimizer",
    "--main-params-dtype": "it goes with --use-precision-aware-optimizer",
    "--exp-avg-dtype": "it goes with --use-precision-aware-optimizer",
    "--exp-avg-sq-dtype": "it goes with --use-precision-aware-optimizer",
    "--enable-cuda-graph": _CUDA_GRAPHS,
    "--external-cuda-graph": _CUDA_GRAPHS,
    "--cuda-graph-*": _CUDA_GRAPHS,
    "--optimizer-cuda-graph": _CUDA_GRAPHS,
    "--cross-entropy-loss-fusion": _KERNEL,
    "--cross-entropy-fusion-impl": _KERNEL,
    "--moe-grouped-gemm": _KERNEL,
    "--moe-permute-fusion": _KERNEL,
    "--moe-router-fusion": _KERNEL,
    "--moe-router-padding-for-quantization": "8-bit kernels need a GPU",
    "--moe-token-dispatcher-type": _EXPERTS_SENT,
    "--moe-enable-deepep": _EXPERTS_SENT,
    "--moe-flex-dispatcher-*": _EXPERTS_SENT,
    "--moe-deepep-num-sms": _EXPERTS_SENT,
    "--moe-hybridep-*": _EXPERTS_SENT,
    "--optimizer-cpu-offload": _PINNED,
    "--cpu-offloading-num-layers": _PINNED,
    "--use-nccl-ub": "NCCL needs GPUs",
    "--use-sharp": "NCCL needs GPUs",
    "--nccl-communicator-config-path": "NCCL needs GPUs",
    "--pipeline-model-parallel-comm-backend": "NCCL and UCX need GPUs",
    "--high-priority-stream-groups": "NCCL needs GPUs",
    "--profile": _PROFILER,
    "--record-memory-history": _PROFILER,
    "--gpu-sniff-test-interval": _PROFILER,
    "--log-energy": _PROFILER,
    "--log-device-memory-used": _PROFILER,
    "--enable-ft-package": "its heartbeats belong to the cluster's launcher",
    "--ckpt-fully-parallel-load-exchange-algo": "gloo gathers no tensors of several shapes",
}


# Packages whose kernels need a GPU, and which Megatron takes for its optimizer, norms and clipping where they can
# be imported.
KERNELS = ("transformer_engine", "apex")


def without_kernel_packages() -> None:
    """Keeps this process from importing packages with GPU kernels; to be called before Megatron is imported.

    A package that was imported already stays.
    """
    for name in KERNELS:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # as the import system has it: an ImportError


@dataclass(frozen=True)
class Replaced:
    """Describes a given flag that the rehearsal runs without.

    Attributes:
        given: the flag as it stood on the command line, e.g. ``--fp8-format hybrid``.
        by: the flag that runs instead; empty when it was dropped.
        why: why it can't run on a CPU.
    """

    given: str
    by: str
    why: str

    def __str__(self) -> str:
        return f"{self.given} -> {self.by or 'left out'} ({self.why})"


@dataclass(frozen=True)
class RehearsalFlags:
    """Holds a command line that was made fit for a CPU.

    Attributes:
        argv: the whole command line.
        added: flags that were not given.
        replaced: flags that were given and can't run here.
    """

    argv: list[str]
    added: list[str]
    replaced: list[Replaced]

    def __str__(self) -> str:
        lines = ["rehearsal: flags set for this machine", *_wrap(self.added)]
        if self.replaced:
            lines.append("rehearsal: flags that can't run without a GPU")
            lines += [f"    {one}" for one in self.replaced]
        lines.append("rehearsal: the rest of the command stays as it will run on the cluster")
        return "\n".join(lines)


def rehearsal_mode(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> str:
    """Returns whether a rehearsal is asked for: ``""`` (no), ``"1"``, or ``"force"`` (even beside real GPUs).

    Raises:
        ConfigError: MEGASCHED_REHEARSE holds something else.
    """
    asked = environ.get(ENVIRONMENT, "")
    if asked not in ("", "0", "1", "force"):
        raise ConfigError(
            f"{ENVIRONMENT}={asked}: it is 1 (rehearse), force (rehearse beside real GPUs) or 0 (off)"
        )
    if asked == "force":
        return "force"
    return "1" if asked == "1" or "--rehearse" in argv else ""


def rehearsal_flags(argv: Sequence[str]) -> RehearsalFlags:
    """Returns the command line ``argv`` (without the script) with the flags that a CPU needs."""
    kept: list[str] = []
    replaced: list[Replaced] = []
    satisfied: set[str] = set()
    grouped = _GROUPED in argv
    for words in _split(argv):
        option, equals, value = words[0].partition("=")
        values = [value, *words[1:]] if equals else words[1:]
        wanted, why = VALUES.get(option, ("", ""))
        reasons = [reason for pattern, reason in DROPPED.items() if fnmatchcase(option, pattern)]
        if why and values != [wanted]:
            replaced.append(Replaced(" ".join(words), f"{option} {wanted}", why))
            kept += [option, wanted]
        elif reasons:
            replaced.append(Replaced(" ".join(words), "", reasons[0]))
        elif grouped and option == "--recompute-modules" and _OF_GROUPED in values:
            fitting = dict.fromkeys(_INSTEAD if value == _OF_GROUPED else value for value in values)
            replaced.append(
                Replaced(" ".join(words), " ".join([option, *fitting]), f"{_OF_GROUPED} needs {_GROUPED}")
            )
            kept += [option, *fitting]
        else:
            kept += words
        satisfied.add(option)
    said = {option for option in VALUES if _BESIDE.get(option, option) in {*satisfied, *VALUES}}
    added = [f"{option} {value}" for option, (value, _) in VALUES.items() if option in said - satisfied]
    added += [option for option in SWITCHES if option not in satisfied]
    return RehearsalFlags(kept + [word for flag in added for word in flag.split()], added, replaced)


def _split(argv: Sequence[str]) -> list[list[str]]:
    """Groups each option with the words that follow it."""
    groups: list[list[str]] = []
    for word in argv:
        if word.startswith("--") or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    return groups


def _wrap(flags: Sequence[str], width: int = 100) -> list[str]:
    lines = [""]
    for flag in flags:
        if lines[-1] and len(lines[-1]) + len(flag) > width:
            lines.append("")
        lines[-1] += f" {flag}" if lines[-1] else flag
    return [f"    {line}" for line in lines if line]
