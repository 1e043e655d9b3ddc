"""A two-layer model under Megatron's DDP and distributed optimizer, small enough for a unit test."""

from pathlib import Path

import torch

from megasched.verify.ranks.pool import init_megatron


def build(bf16=False, bucket_size=None, distributed=True, float32=None):
    """DDP-wrapped model and its optimizer, over all ranks of the case as data parallel.

    Args:
        bucket_size: elements of a bucket of gradients; one holds all where it is None.
        distributed: the optimizer is.
        float32: name of a parameter that stays in float32.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = torch.bfloat16 if bf16 else torch.float32
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        use_cpu_initialization=True,
        bf16=bf16,
        params_dtype=dtype,
        gradient_accumulation_fusion=False,
    )

    class Model(MegatronModule):
        def __init__(self):
            super().__init__(config)
            init = torch.nn.init.normal_
            self.up = ColumnParallelLinear(16, 32, config=config, init_method=init)
            apart = {"skip_bias_add": float32 is not None}
            self.down = ColumnParallelLinear(32, 16, config=config, init_method=init, **apart)

        def forward(self, x):
            if float32 is None:
                return self.down(torch.tanh(self.up(x)[0]))[0]
            out, bias = self.down(torch.tanh(self.up(x)[0]))
            return out.float() + bias

    torch.manual_seed(3)
    buckets = {"overlap_grad_reduce": bucket_size is not None, "bucket_size": bucket_size}
    reduction = DistributedDataParallelConfig(use_distributed_optimizer=distributed, **buckets)
    model = Model().to(dtype)
    if float32 is not None:
        kept = model.get_parameter(float32)
        kept.data = kept.data.float()
    ddp = DistributedDataParallel(config, reduction, model)
    settings = OptimizerConfig(
        optimizer="adam", lr=0.05, bf16=bf16, params_dtype=dtype, use_distributed_optimizer=distributed
    )
    return ddp, get_megatron_optimizer(settings, [ddp])


def inner(optimizer):
    """Megatron's DistributedOptimizer under the chain that get_megatron_optimizer returns."""
    return getattr(optimizer, "chained_optimizers", [optimizer])[0]


def train(ddp, optimizer, steps, first=0):
    for step in range(first, first + steps):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        ddp(x.to(next(ddp.parameters()).dtype)).float().square().mean().backward()
        ddp.finish_grad_sync()
        optimizer.step()


def weights(ddp):
    return torch.cat([param.detach().float().flatten() for param in ddp.parameters()])


def adam_steps(optimizer):
    return [state["step"].item() for state in inner(optimizer).optimizer.state.values()]


def checkpoint(ddp, optimizer, folder, kind, is_loading, **metadata):
    """Saves or loads the optimizer's torch_dist checkpoint in one of Megatron's formats."""
    from megatron.core import dist_checkpointing

    metadata = {"distrib_optim_sharding_type": kind, **metadata}
    model = ddp.module.sharded_state_dict()
    state = {"optimizer": optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)}
    if not is_loading:
        dist_checkpointing.save(state, folder)
    else:
        optimizer.load_state_dict(dist_checkpointing.load(state, folder)["optimizer"])


def resume(folder, kind, bf16=False):
    """Weights after 2 + 3 steps, without and with a checkpoint between; AdamW's step counts of each."""
    init_megatron()
    ddp, optimizer = build(bf16)
    train(ddp, optimizer, 2)
    if torch.distributed.get_rank() == 0:
        Path(folder).mkdir()
    torch.distributed.barrier()
    checkpoint(ddp, optimizer, folder, kind, is_loading=False)
    saved = {name: value.clone() for name, value in ddp.module.state_dict().items() if value is not None}
    train(ddp, optimizer, 3, first=2)

    again, fresh = build(bf16)
    again.module.load_state_dict(saved, strict=False)
    fresh.reload_model_params()
    checkpoint(again, fresh, folder, kind, is_loading=True)
    train(again, fresh, 3, first=2)
    return weights(ddp), weights(again), adam_steps(optimizer), adam_steps(fresh)
