"""Decides what the quickstart runs: the model, the layout that fits the machine, and Megatron's flags."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megasched.language.parallel_dims import ParallelDims
from megasched.launch import bundled_script
from megasched.launch.quickstart.corpus import EOD, VOCAB_SIZE

SEQ_LENGTH = 128
MICRO_BATCH_SIZE = 1
GLOBAL_BATCH_SIZE = 4
TOKENS_PER_STEP = SEQ_LENGTH * GLOBAL_BATCH_SIZE

# The interleaved schedule needs as many micro-batches on each replica as there are pipeline ranks.
MAX_DATA_PARALLEL_SIZE = 2

# Ranks used on a machine without a GPU.
HOST_RANKS = 4


@dataclass(frozen=True)
class Plan:
    """Describes how this machine is used.

    Attributes:
        layout: how the model is spread; its ranks are all of the job's.
        on_gpus: whether each rank has a GPU; otherwise the ranks share the CPU (``--rehearse``).
        transformer_engine: whether Megatron may use Transformer Engine's layers.
    """

    layout: ParallelDims
    on_gpus: bool
    transformer_engine: bool

    @property
    def ranks(self) -> int:
        return self.layout.tp * self.layout.pp * self.layout.data_parallel_size

    def __str__(self) -> str:
        where = "a GPU each, bf16" if self.on_gpus else "no GPU found, so on the CPU, float32"
        engine = "with Transformer Engine" if self.transformer_engine else "without Transformer Engine"
        return f"{self.ranks} rank{'s' * (self.ranks > 1)} ({where}), layout {self.layout}, {engine}"


def detect_plan() -> Plan:
    """Returns the plan for this machine: its GPUs, or a rehearsal on the CPU where it has none."""
    import torch

    gpus = torch.cuda.device_count()
    if not gpus:
        return Plan(layout=choose_layout(HOST_RANKS), on_gpus=False, transformer_engine=False)
    engine = importlib.util.find_spec("transformer_engine") is not None
    return Plan(layout=choose_layout(gpus), on_gpus=True, transformer_engine=engine)


def choose_layout(devices: int) -> ParallelDims:
    """Returns a layout for at most this many devices: TP 2 first, then PP 2 with VPP 2, then two replicas.

    The quickstart's model has 2 key-value heads and 4 layers, so TP stops at 2 and PP x VPP at 4. Devices
    that make no full step are left idle: of 3, two are used; of 6, four; of more than 8, eight.
    """
    return ParallelDims(
        tensor_model_parallel_size=2 if devices >= 2 else 1,
        pipeline_model_parallel_size=2 if devices >= 4 else 1,
        virtual_pipeline_model_parallel_size=2 if devices >= 4 else None,
        data_parallel_size=MAX_DATA_PARALLEL_SIZE if devices >= 8 else 1,
        micro_batch_size=MICRO_BATCH_SIZE,
    )


def write_model(folder: Path) -> None:
    """Saves a stock Llama config of about 5.3 M parameters, with byte-level embeddings, as ``config.json``."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCAB_SIZE,
        hidden_size=384,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=SEQ_LENGTH,
        bos_token_id=None,
        eos_token_id=EOD,
    )
    config.save_pretrained(folder)


def default_schedule() -> str:
    """Returns the example schedule for Llama, which lies in the source tree as in the installed package."""
    return str(Path(__file__).resolve().parents[2] / "examples" / "schedules" / "llama.py")


def training_command(
    plan: Plan, *, schedule: str, model: Path, corpus_prefix: str, cache: Path, checkpoints: Path, iters: int
) -> list[str]:
    """Returns the torchrun command with Megatron's flags, without repeating what the HF config says of the model.

    Args:
        plan: the layout and the devices.
        schedule: path of the model's schedule, or ``auto``.
        model: folder with ``config.json`` and the tokenizer.
        corpus_prefix: value of ``--data-path``.
        cache: folder where Megatron keeps the indices of its datasets.
        checkpoints: folder where it saves, at the end.
        iters: number of optimizer steps.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(plan.ranks)]
    return [
        *launcher,
        *("-m", "megasched", str(bundled_script("pretrain_gpt.py"))),
        *("--model-schedule", schedule),
        *("--hf-model", str(model), "--hf-random-init"),
        *_layout_flags(plan.layout),
        *_device_flags(plan),
        *("--seq-length", str(SEQ_LENGTH)),
        *("--micro-batch-size", str(MICRO_BATCH_SIZE), "--global-batch-size", str(GLOBAL_BATCH_SIZE)),
        *("--train-iters", str(iters), "--lr", "1e-3", "--min-lr", "1e-4", "--lr-decay-style", "cosine"),
        *("--lr-warmup-iters", str(min(10, iters // 2)), "--weight-decay", "0.1", "--adam-beta2", "0.95"),
        *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(model)),
        *("--data-path", corpus_prefix, "--data-cache-path", str(cache), "--split", "97,3,0"),
        *("--num-workers", "0", "--no-create-attention-mask-in-dataloader"),
        # A quarter and one more: the last validation is the one that Megatron does after training anyway.
        *("--eval-iters", "16", "--eval-interval", str(iters // 4 + 1), "--log-interval", "1"),
        *("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"),
        *("--save", str(checkpoints), "--save-interval", str(iters), "--ckpt-format", "torch_dist"),
    ]


def other_layout_flags(plan: Plan) -> list[str]:
    """Returns flags that, added to the training command, spread the same model over the same ranks differently."""
    ranks_of_one_model = plan.layout.tp * plan.layout.pp
    flags = ["--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", str(ranks_of_one_model)]
    # One stage a rank is no interleaving; said only where the command has it to be undone.
    return [*flags, "--num-virtual-stages-per-pipeline-rank", "1"] if plan.layout.vpp > 1 else flags


def rank_environment(plan: Plan) -> dict[str, str]:
    """Returns the variables that the ranks need in their environment besides this process's own."""
    # Megatron refuses TP and CP without it on GPUs before Blackwell.
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if not plan.on_gpus:
        env["OMP_NUM_THREADS"] = "1"  # there are more ranks than cores already
        env["TORCHDYNAMO_DISABLE"] = "1"  # compiling for the CPU takes longer than the run
    return env


def shell_script(command: Sequence[str], env: Mapping[str, str]) -> str:
    """Returns the command as a bash script that takes further flags; of one given twice, the last counts."""
    lines: list[list[str]] = [[]]
    for word in command:
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(word)
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items())
    body = " \\\n    ".join(shlex.join(line) for line in lines)
    return f'#!/usr/bin/env bash\nset -euo pipefail\n{exports}exec {body} \\\n    "$@"\n'


def _layout_flags(layout: ParallelDims) -> list[str]:
    flags = ["--tensor-model-parallel-size", str(layout.tp), "--pipeline-model-parallel-size", str(layout.pp)]
    if layout.virtual_pipeline_model_parallel_size is not None:
        flags += ["--num-virtual-stages-per-pipeline-rank", str(layout.vpp)]
    return flags


def _device_flags(plan: Plan) -> list[str]:
    return ["--bf16"] if plan.on_gpus else ["--rehearse"]
