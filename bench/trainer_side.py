"""Megatron's trainer around whatever model is measured: its flags, its optimizer, its ``train_step``.

Every contender goes through here, so that all have the same data, batch, optimizer, gradient clipping, loss
reduction and dtype policy by construction; what differs is the class that builds the model chunk.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import native
import shapes

MEGASCHED = "megasched.trainer.builder.ScheduledModelBuilder"


@dataclass(frozen=True)
class Setting:
    """What all contenders of one comparison share.

    Attributes:
        shape: key of ``shapes.SHAPES``.
        micro_batch_size: sequences in a step on one data-parallel rank; one micro-batch a step.
        bf16: Megatron's ``--bf16``: parameters in bfloat16, gradients and optimizer in float32.
        rehearse: on the CPU, CUDA emulated.
        tp, sp: Megatron's tensor-parallel size, and whether with sequence parallelism.
        replicas: Megatron's data-parallel size.
        extra: further Megatron flags, e.g. ``("--fp8-format", "hybrid")``.
    """

    shape: str
    micro_batch_size: int = 1
    bf16: bool = False
    rehearse: bool = False
    tp: int = 1
    sp: bool = False
    extra: tuple[str, ...] = ()
    replicas: int = 1

    @property
    def sequence_length(self) -> int:
        return shapes.SHAPES[self.shape]["max_position_embeddings"]

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.micro_batch_size * self.replicas * self.sequence_length


@dataclass
class Side:
    """A model with its optimizer, ready for ``train_step``."""

    model: list[Any]
    optimizer: Any
    scheduler: Any
    config: Any
    iteration: int = 0
    loss: Any = None

    def step(self, data: Iterator[dict[str, Any]]) -> float:
        """Seconds of one optimizer step; ``loss`` is that of all replicas then."""
        import torch
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.training.training import train_step

        torch.cuda.synchronize()
        start = time.perf_counter()
        reported, *_ = train_step(
            *(forward_step, data, self.model, self.optimizer, self.scheduler, self.config),
            *(get_forward_backward_func(), self.iteration),
        )
        torch.cuda.synchronize()
        self.iteration += 1
        self.loss = reported.get("lm loss")
        return time.perf_counter() - start


def flags(setting: Setting, schedule: str = "auto") -> list[str]:
    """Megatron's command line."""
    from megasched.trainer.flags.rehearsal import rehearsal_flags

    length, batch = str(setting.sequence_length), str(setting.micro_batch_size)
    whole = str(setting.micro_batch_size * setting.replicas)
    given = ["--model-schedule", schedule, "--hf-model", shapes.model_folder(setting.shape), "--hf-random-init"]
    given += ["--seq-length", length, "--train-iters", "1000", "--lr", "1e-4"]
    given += ["--micro-batch-size", batch, "--global-batch-size", whole]
    given += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(shapes.SHAPES[setting.shape]["vocab_size"])]
    given += ["--mock-data", "--eval-iters", "0", "--eval-interval", "9999"]
    given += ["--tensor-model-parallel-size", str(setting.tp)]
    given += ["--sequence-parallel"] if setting.sp else []
    given += ["--bf16"] if setting.bf16 else []
    given += setting.extra
    if setting.rehearse:
        return rehearsal_flags([*given, "--rehearse"]).argv
    # Megatron's detection of faults wants an iterator of its own around the data, and times what it does.
    return [*given, "--no-gradient-accumulation-fusion", "--rerun-mode", "disabled"]


def start(setting: Setting, schedule: str = "auto") -> Any:
    """Patches, Megatron's arguments and process groups, once in a process; returns the arguments."""
    from megasched.trainer.entry import apply_patches
    from megasched.trainer.flags.rehearsal import without_kernel_packages

    if setting.rehearse:
        without_kernel_packages()
    apply_patches("1" if setting.rehearse else "")
    sys.argv = ["bench", *flags(setting, schedule)]
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.initialize import initialize_megatron

    args = parse_and_validate_args()
    initialize_megatron()
    return args


def build(args: Any, builder: str) -> Side:
    """The model and its optimizer, as Megatron's ``pretrain`` makes them.

    Args:
        builder: the class that builds the model, by import path, or ``native.NATIVE``.
    """
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.utils import get_model_config
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.training import setup_model_and_optimizer

    container = pretrain_cfg_container_from_args(args, native.model_config(args, builder))
    model, optimizer, scheduler = setup_model_and_optimizer(
        ModelType.encoder_or_decoder,
        cfg_container=container,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    config = get_model_config(model[0])
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    return Side(model, optimizer, scheduler, config)


def token_ids(setting: Setting) -> Any:
    """[b, s + 1] of all replicas."""
    import torch

    size = (setting.micro_batch_size * setting.replicas, setting.sequence_length + 1)
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, shapes.SHAPES[setting.shape]["vocab_size"], size, generator=generator)


def batches(setting: Setting) -> Iterator[dict[str, Any]]:
    """This replica's part of the same random batch again and again, on this rank's device."""
    import torch
    from megatron.core import parallel_state

    replica = parallel_state.get_data_parallel_rank()
    ids = token_ids(setting).chunk(setting.replicas)[replica].cuda()
    batch = {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    batch["position_ids"] = torch.arange(setting.sequence_length, device=ids.device).expand_as(batch["tokens"])
    batch["loss_mask"] = torch.ones_like(batch["tokens"], dtype=torch.float32)
    while True:
        yield batch


def forward_step(data: Iterator[dict[str, Any]], model: Any) -> Any:
    """What Megatron's ``train_step`` calls for each micro-batch."""
    from megasched.launch.pretrain_gpt import loss_func

    batch = next(data)
    output = model(
        batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=batch["loss_mask"]
    )
    return output, partial(loss_func, batch["loss_mask"])


def setting_from(options: Namespace, extra: Sequence[str] = ()) -> Setting:
    """The setting that a command line's options say."""
    return Setting(
        options.shape,
        options.micro_batch_size,
        options.bf16,
        options.rehearse,
        getattr(options, "tp", 1),
        getattr(options, "sp", False),
        tuple(extra),
    )
