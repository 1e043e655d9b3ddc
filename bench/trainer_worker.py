"""One trainer on one of its ranks: builds the model and steps; the first rank writes what the steps took.

``trainers.py`` starts it under torchrun. Every trainer has the same weights, global batch, AdamW, clipping, loss
and precision, so that the losses of its steps say whether it does what the others do.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import machine
import memory
import native
import shapes
import trainer_side
from contender_worker import first_reason

ADAMW = {"lr": 1e-4, "weight_decay": 0.0}
AS_MEGATRON = ("--lr-decay-style", "constant", "--weight-decay", "0.0")
CLIP = 1.0  # Megatron's own
SEED = 1234  # Megatron's own, by which its ranks draw weights

# One optimizer step; gives the loss of this rank's sequences.
Step = Callable[[], Any]


@dataclass(frozen=True)
class Job:
    """What the trainers of one comparison share.

    Attributes:
        shape: key of ``shapes.SHAPES``.
        ranks: of the run, on this machine.
        tp: tensor-parallel size of those that cut the model.
        sequences: in a step, over all ranks.
        warmup, steps: steps before the timed ones, and those.
        rehearse: on the CPU; megasched and Megatron see CUDA emulated.
        bf16: products in bfloat16, weights and their updates in float32; each trainer has its own way to say so.

    Raises:
        ValueError: TP does not divide the ranks, or those the sequences.
    """

    shape: str
    ranks: int
    tp: int
    sequences: int
    warmup: int
    steps: int
    rehearse: bool
    bf16: bool = False

    def __post_init__(self) -> None:
        if self.ranks % self.tp or self.sequences % self.ranks:
            what = f"TP {self.tp}, {self.ranks} ranks and {self.sequences} sequences"
            raise ValueError(f"{what}: TP must divide the ranks, and they the sequences")

    def setting(self, tp: int) -> trainer_side.Setting:
        replicas = self.ranks // tp
        each = self.sequences // replicas
        return trainer_side.Setting(
            self.shape, each, self.bf16, self.rehearse, tp, extra=AS_MEGATRON, replicas=replicas
        )


@dataclass
class Run:
    """A trainer's run on this rank, of ``tp`` ranks to a replica.

    Attributes:
        before: bytes that were allocated before there was a model.
    """

    job: Job
    tp: int
    before: int | None = None

    def join(self) -> None:
        """The world of ranks, for trainers that do not make it themselves."""
        import torch

        if not self.job.rehearse:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("gloo" if self.job.rehearse else "nccl")

    def mark(self) -> None:
        """Memory is counted from here, once."""
        import torch._dynamo  # noqa: F401  (the first step of torch's optimizers would)

        if self.before is None:
            self.before = memory.allocated()

    def model(self) -> Any:
        """HF's model, as transformers ships it; the same weights on every rank."""
        from megasched.definition.build import build_definition
        from megasched.weights.random_init import RandomInit
        from megasched.weights.source import materialize

        self.mark()
        config = shapes.hf_config(self.job.shape, use_cache=False)
        config._attn_implementation = "sdpa"
        model = build_definition(config)
        materialize(model, RandomInit(model, SEED))
        return model.to(self.device).train()

    @property
    def device(self) -> str:
        return "cpu" if self.job.rehearse else "cuda"

    def batch(self) -> dict[str, Any]:
        """This replica's part: tokens and labels [b, s] as Megatron's, the labels one further already."""
        import torch

        replica = torch.distributed.get_rank() // self.tp
        ids = trainer_side.token_ids(self.job.setting(self.tp)).chunk(self.job.ranks // self.tp)[replica]
        labels = ids[:, 1:].contiguous().to(self.device)
        return {"input_ids": ids[:, :-1].contiguous().to(self.device), "labels": labels, "shift_labels": labels}


def adamw(parameters: Any) -> Any:
    import torch

    return torch.optim.AdamW(parameters, **ADAMW)


def by_hand(run: Run, model: Any, wrapped: Any, clip: Callable[[], Any]) -> Step:
    """A plain loop; ``clip`` clips the gradients of the model."""
    import torch

    optimizer, batch = adamw(model.parameters()), run.batch()

    def step() -> Any:
        with torch.autocast(run.device, torch.bfloat16, enabled=run.job.bf16):
            loss = wrapped(**batch).loss
        loss.backward()
        clip()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def hf_ddp(run: Run, prepare: Callable[[Any], Any] = lambda model: model) -> Step:
    """DDP over all ranks; ``prepare`` makes of the model what is called."""
    from torch.nn.parallel import DistributedDataParallel
    from torch.nn.utils import clip_grad_norm_

    run.join()
    model = run.model()
    wrapped = DistributedDataParallel(prepare(model))
    return by_hand(run, model, wrapped, lambda: clip_grad_norm_(model.parameters(), CLIP))


def compiled(model: Any) -> Any:
    import torch

    return torch.compile(model, dynamic=False)


def by_liger(model: Any) -> Any:
    """With Liger's kernels, its fused head and loss included."""
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model)
    return model


def hf_fsdp2(run: Run) -> Step:
    """FSDP2 over all ranks, layer by layer."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.utils import clip_grad_norm_

    run.join()
    model, mesh = run.model(), init_device_mesh(run.device, (run.job.ranks,))
    dtype = torch.bfloat16 if run.job.bf16 else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return by_hand(run, model, model, lambda: clip_grad_norm_(model.parameters(), CLIP))


def megasched_ddp(run: Run) -> Step:
    """A scheduled model under DDP over its replicas."""
    from torch.nn.parallel import DistributedDataParallel

    import megasched

    group = in_groups(run)
    model = megasched.build(megasched.create_schedule(run.model(), name="auto"))
    wrapped = DistributedDataParallel(model, process_group=group)
    return by_hand(run, model, wrapped, lambda: megasched.clip_grad_norm_(model, CLIP))


def in_groups(run: Run) -> Any:
    """Megatron's groups of ranks; returns that of this rank's replicas."""
    from megasched.patches import host_cuda

    if run.job.rehearse:
        host_cuda.install()
    from megatron.core import parallel_state

    run.join()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=run.tp)
    return parallel_state.get_data_parallel_group()


def by_engine(run: Run, engine: Any) -> Step:
    batch = run.batch()

    def step() -> Any:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def zero(run: Run, stage: int, **more: Any) -> dict[str, Any]:
    """DeepSpeed's config."""
    return {
        "train_micro_batch_size_per_gpu": run.job.sequences // (run.job.ranks // run.tp),
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": run.job.bf16},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": CLIP,
        "steps_per_print": 10**9,
        **more,
    }


def deepspeed(run: Run, stage: int, **more: Any) -> Step:
    """HF's model under DeepSpeed's engine."""
    from megasched.dialects.deepspeed.engine import imported

    run.join()
    theirs, model = imported(), run.model()
    engine, *_ = theirs.initialize(
        model=model, optimizer=adamw(model.parameters()), config=zero(run, stage, **more)
    )
    return by_engine(run, engine)


def deepspeed_autotp(run: Run) -> Step:
    return deepspeed(run, 1, tensor_parallel={"autotp_size": run.tp})


def megasched_deepspeed(run: Run) -> Step:
    """A scheduled model under DeepSpeed's engine."""
    import megasched
    from megasched.dialects.deepspeed.engine import imported

    in_groups(run)
    imported()
    sch = megasched.create_schedule(run.model(), name="auto")
    engine, *_ = megasched.initialize(sch, target="deepspeed", config=zero(run, 1), optimizer=adamw)
    return by_engine(run, engine)


def megatron(run: Run, builder: str) -> Step:
    """Megatron's own trainer around its model or a scheduled one."""
    setting = run.job.setting(run.tp)
    args = trainer_side.start(setting)
    run.mark()
    side, data = trainer_side.build(args, builder), trainer_side.batches(setting)
    if builder == native.NATIVE:
        from megatron.core.utils import unwrap_model

        native.fill(unwrap_model(side.model[0]), run.model(), args.rank % run.tp, run.tp)
        side.optimizer.reload_model_params()  # what it keeps in float32

    def step() -> Any:
        side.step(data)
        return side.loss

    return step


@dataclass(frozen=True)
class Trainer:
    """A trainer.

    Attributes:
        build: makes its step, on a rank.
        cut: whether it cuts the model over TP ranks.
        deepspeed: whether it needs that package.
    """

    build: Callable[[Run], Step]
    cut: bool = False
    deepspeed: bool = False


TRAINERS = {
    "hf_ddp": Trainer(hf_ddp),
    "hf_compile_ddp": Trainer(partial(hf_ddp, prepare=compiled)),
    "hf_liger_ddp": Trainer(partial(hf_ddp, prepare=by_liger)),
    "hf_fsdp2": Trainer(hf_fsdp2),
    "deepspeed_zero1": Trainer(partial(deepspeed, stage=1), deepspeed=True),
    "deepspeed_zero3": Trainer(partial(deepspeed, stage=3), deepspeed=True),
    "deepspeed_autotp": Trainer(deepspeed_autotp, cut=True, deepspeed=True),
    "megasched_ddp": Trainer(megasched_ddp, cut=True),
    "megasched_deepspeed_zero1": Trainer(megasched_deepspeed, cut=True, deepspeed=True),
    "megasched_megatron": Trainer(partial(megatron, builder=trainer_side.MEGASCHED), cut=True),
    "megatron_native": Trainer(partial(megatron, builder=native.NATIVE), cut=True),
}


def measure(job: Job, name: str) -> dict[str, Any]:
    """Losses of the steps before, seconds of a timed one, and the most that each rank held beyond its imports."""
    import torch

    trainer = TRAINERS[name]
    run = Run(job, job.tp if trainer.cut else 1)
    step = trainer.build(run)
    losses = [_mean(step()) for _ in range(job.warmup)]
    memory.forget_peak()
    torch.distributed.barrier()
    start = time.perf_counter()
    for _ in range(job.steps):
        step()
    if machine.on_gpu():
        torch.cuda.synchronize()
    torch.distributed.barrier()
    seconds = (time.perf_counter() - start) / job.steps
    peaks: list[int] = [0] * job.ranks
    torch.distributed.all_gather_object(peaks, memory.peak() - run.before)
    return {"losses": losses, "seconds": seconds, "peak_bytes": peaks}


def _mean(loss: Any) -> float:
    """Of all replicas; the ranks of one have the same."""
    import torch

    total = loss.detach().clone().float().reshape(())
    torch.distributed.all_reduce(total)
    return float(total) / torch.distributed.get_world_size()


def main() -> None:
    job, name, into = Job(**json.loads(sys.argv[1])), sys.argv[2], Path(sys.argv[3])
    try:
        found = measure(job, name)
        if os.environ["RANK"] == "0":
            into.write_text(json.dumps(found))
    except Exception as error:
        into.with_suffix(".failed").write_text(f"{type(error).__name__}: {first_reason(error)}")
        raise
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # process groups wait for nobody


if __name__ == "__main__":
    main()
