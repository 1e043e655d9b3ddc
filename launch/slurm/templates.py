"""Writes the batch scripts for people who want no tool: ``python -m megasched.launch.slurm.templates``.

They are what the tool itself would write for 64 GPUs, so they can't fall behind it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megasched.launch.slurm.script import SlurmJob, render

FOLDER = Path(__file__).parent
HEAD = """Change what names paths, account, partition and model; make the folder of the logs; submit:

    mkdir -p /path/to/runs/my-run/logs && sbatch {name}

`megasched launch slurm` writes this script with your paths in it, and checks the whole job first.
docs/launch.md says more of each part.
"""
JOB = SlurmJob(
    name="my-run",
    run_folder=Path("/path/to/runs/my-run"),
    directory=Path("/path/to/project"),
    nodes=8,
    gpus_per_node=8,
    script="pretrain_gpt.py",
    flags=(
        *("--model-schedule", "auto", "--hf-model", "/path/to/Qwen3-8B"),
        *("--tensor-model-parallel-size", "2", "--sequence-parallel", "--pipeline-model-parallel-size", "4"),
        *("--num-virtual-stages-per-pipeline-rank", "3"),
        *("--micro-batch-size", "1", "--global-batch-size", "256"),
        *("--seq-length", "8192", "--train-iters", "100000"),
        *("--lr", "1.5e-4", "--min-lr", "1.5e-5", "--lr-decay-style", "cosine", "--lr-warmup-iters", "2000"),
        *("--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
        *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "/path/to/Qwen3-8B"),
        *("--data-path", "/path/to/data/corpus_text_document", "--split", "99,1,0"),
        *("--save", "/path/to/checkpoints/my-run", "--save-interval", "500", "--ckpt-format", "torch_dist"),
        *("--dist-ckpt-optim-fully-reshardable", "--eval-interval", "1000", "--eval-iters", "10"),
        *("--log-interval", "10", "--log-throughput"),
    ),
    python="/path/to/venv/bin/python",
    time="24:00:00",
    sbatch_options=("--account=my-account", "--partition=my-partition", "--exclusive"),
    cpus_per_gpu=12,
)


def templates() -> dict[str, str]:
    """Returns the texts of the batch scripts by name."""
    kinds = {"pretrain_64gpu.sbatch": False, "pretrain_64gpu_torchrun.sbatch": True}
    return {
        name: render(replace(JOB, torchrun=torchrun), HEAD.format(name=name)) for name, torchrun in kinds.items()
    }


def main() -> None:
    for name, text in templates().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
