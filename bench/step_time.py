"""Step time of a scheduled HF Llama against Megatron's native GPTModel of the same shape.

Both are built in one launch, with one set of flags, and step in turn on the same batch, so that what else
the machine does hits both alike. The figure is the median over rounds of megasched's time divided by
native's.

    python -m torch.distributed.run --nproc-per-node 2 bench/step_time.py --tp 2 --rehearse
    python -m torch.distributed.run --nproc-per-node 1 bench/step_time.py --shape 1b --bf16
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

sys.path.insert(0, __file__.rpartition("/")[0])
import machine

SHAPES = {
    "small": {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 512,
    },
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
}
BUILDERS = {
    "native": "megatron.training.models.gpt.GPTModelBuilder",
    "megasched": "megasched.megatron.builder.ScheduledModelBuilder",
}


def main() -> None:
    own = argparse.ArgumentParser(description=__doc__)
    own.add_argument("--shape", choices=SHAPES, default="small")
    own.add_argument("--tp", type=int, default=1)
    own.add_argument("--sp", action="store_true")
    own.add_argument("--micro-batch-size", type=int, default=1)
    own.add_argument("--rounds", type=int, default=15)
    own.add_argument("--warmup", type=int, default=3)
    own.add_argument("--bf16", action="store_true")
    own.add_argument("--rehearse", action="store_true")
    own.add_argument("--name", help="of the results file; made from the options otherwise")
    options = own.parse_args()
    contenders = build(options)
    times = measure(contenders, options)
    report(times, options)


def build(options: argparse.Namespace) -> dict[str, Any]:
    """Name -> (model, optimizer, scheduler, config) of each contender, all from the same flags."""
    from megasched import patches

    if options.rehearse:
        patches.apply("host_cuda", force=False)
    for patch in patches.available():
        if patch.name != "host_cuda":
            patches.apply(patch.name)
    sys.argv = ["step_time.py", *flags(options)]
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.utils import get_model_config
    from megatron.training import get_args
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.initialize import initialize_megatron
    from megatron.training.models.gpt import GPTModelConfig
    from megatron.training.training import setup_model_and_optimizer

    args = parse_and_validate_args()
    initialize_megatron()
    found = {}
    for name, builder in BUILDERS.items():
        GPTModelConfig.builder = builder
        container = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
        model, optimizer, scheduler = setup_model_and_optimizer(
            ModelType.encoder_or_decoder,
            cfg_container=container,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        config = get_model_config(model[0])
        config.grad_scale_func = optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        found[name] = (model, optimizer, scheduler, config)
    assert get_args() is args
    return found


def flags(options: argparse.Namespace) -> list[str]:
    from transformers import LlamaConfig

    from megasched.megatron.rehearsal import rehearsal_flags

    shape = SHAPES[options.shape]
    folder = tempfile.mkdtemp(prefix="step_time")
    LlamaConfig(**shape).save_pretrained(folder)
    given = ["--model-schedule", "auto", "--hf-model", folder, "--hf-random-init"]
    given += ["--seq-length", str(shape["max_position_embeddings"]), "--train-iters", "1000", "--lr", "1e-4"]
    given += ["--micro-batch-size", str(options.micro_batch_size), "--tokenizer-type", "NullTokenizer"]
    given += [
        "--vocab-size",
        str(shape["vocab_size"]),
        "--mock-data",
        "--eval-iters",
        "0",
        "--eval-interval",
        "9999",
    ]
    given += [
        "--tensor-model-parallel-size",
        str(options.tp),
        "--global-batch-size",
        str(options.micro_batch_size),
    ]
    given += ["--sequence-parallel"] if options.sp else []
    given += ["--bf16"] if options.bf16 else []
    if options.rehearse:
        return rehearsal_flags([*given, "--rehearse"]).argv
    return [*given, "--no-gradient-accumulation-fusion"]


def batches(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The same random batch again and again, on this rank's device."""
    import torch

    shape = SHAPES[options.shape]
    size = (options.micro_batch_size, shape["max_position_embeddings"] + 1)
    ids = torch.randint(0, shape["vocab_size"], size, generator=torch.Generator().manual_seed(1)).cuda()
    batch = {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    batch["position_ids"] = torch.arange(size[1] - 1, device=ids.device).expand_as(batch["tokens"])
    batch["loss_mask"] = torch.ones_like(batch["tokens"], dtype=torch.float32)
    while True:
        yield batch


def forward_step(data: Iterator[dict[str, Any]], model: Any) -> Any:
    from functools import partial

    from megasched.launch.pretrain_gpt import loss_func

    batch = next(data)
    output = model(
        batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=batch["loss_mask"]
    )
    return output, partial(loss_func, batch["loss_mask"])


def measure(contenders: dict[str, Any], options: argparse.Namespace) -> dict[str, list[float]]:
    """Name -> seconds of each step, the contenders in turn and in changing order."""
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.training.training import train_step

    data = batches(options)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_number in range(options.warmup + options.rounds):
        order = list(contenders) if round_number % 2 else list(reversed(contenders))
        for name in order:
            model, optimizer, scheduler, config = contenders[name]
            torch.distributed.barrier()
            torch.cuda.synchronize()
            start = time.perf_counter()
            train_step(
                forward_step, data, model, optimizer, scheduler, config, get_forward_backward_func(), round_number
            )
            torch.cuda.synchronize()
            if round_number >= options.warmup:
                times[name].append(time.perf_counter() - start)
    return times


def report(times: dict[str, list[float]], options: argparse.Namespace) -> None:
    import torch

    if torch.distributed.get_rank():
        return
    ratios = [ours / native for ours, native in zip(times["megasched"], times["native"], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    data = {
        "options": vars(options),
        "median_seconds": {name: statistics.median(found) for name, found in times.items()},
        "ratio_median": statistics.median(ratios),
        "ratio_quartiles": [low, high],
        "seconds": times,
    }
    name = options.name or "_".join(
        [
            "step_time",
            options.shape,
            f"tp{options.tp}",
            *(["sp"] if options.sp else []),
            "cpu" if options.rehearse else "gpu",
        ]
    )
    path = machine.write(name, data)
    medians = ", ".join(f"{name} {1000 * value:.1f} ms" for name, value in data["median_seconds"].items())
    print(
        f"{medians}; megasched / native = {data['ratio_median']:.3f} (quartiles {low:.3f} to {high:.3f}); {path}"
    )


if __name__ == "__main__":
    main()
