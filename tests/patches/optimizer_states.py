"""What the distributed optimizer holds of each parameter, before a checkpoint and after it is loaded."""

from pathlib import Path

import torch

from megasched.patches import apply, undo
from megasched.verify.ranks.pool import init_megatron
from tests.patches.optimizer_case import build, checkpoint, inner, train

STATES = ("param", "exp_avg", "exp_avg_sq")
BUCKET = 100  # elements: the model has two buckets
TORCH = "torch"  # of --ckpt-format; all else are sharding types of torch_dist


def saved(folder, kind, bf16=False, patched=True, **metadata):
    """What this rank holds after two steps, when it wrote a checkpoint."""
    (apply if patched else undo)("bucket_padding")
    ddp, optimizer = _started(bf16)
    train(ddp, optimizer, 2)
    if torch.distributed.get_rank() == 0:
        Path(folder).mkdir()
    torch.distributed.barrier()
    if kind == TORCH:
        inner(optimizer).save_parameter_state(f"{folder}/states.pt")
    else:
        checkpoint(ddp, optimizer, folder, kind, is_loading=False, **metadata)
    return held(ddp, optimizer)


def loaded(folder, kind, bf16=False):
    """What this rank holds when it has loaded the checkpoint."""
    ddp, optimizer = _started(bf16)
    if kind == TORCH:
        train(ddp, optimizer, 1)  # as load_state_dict does it: there are moments to load into
        inner(optimizer).load_parameter_state(f"{folder}/states.pt")
    else:
        checkpoint(ddp, optimizer, folder, kind, is_loading=True)
    return held(ddp, optimizer)


def _started(bf16):
    init_megatron()
    ddp, optimizer = build(bf16, BUCKET)
    (buffer,) = ddp.buffers
    assert len(buffer.buckets) == 2
    assert all(bucket.grad_data.numel() > bucket.numel_unpadded for bucket in buffer.buckets)
    return ddp, optimizer


def held(ddp, optimizer):
    """Name -> first element and the tensors, of this rank's part of each parameter."""
    names = {param: name for name, param in ddp.named_parameters()}
    distributed, found = inner(optimizer), {}
    for ranges in distributed.gbuf_ranges:
        for buckets in ranges.values():
            for param, places in [pair for bucket in buckets for pair in bucket["param_map"].items()]:
                tensors = distributed._get_main_param_and_optimizer_states(param)
                parts = {key: tensors[key].detach().clone() for key in STATES}
                found[names[param]] = places["param"].start, parts
    return found


def joined(ranks):
    """Name and state -> the whole tensor, of what each rank holds."""
    parts = {}
    for rank in ranks:
        for name, (start, tensors) in rank.items():
            for key, tensor in tensors.items():
                parts.setdefault((name, key), {})[start] = tensor
    return {of: torch.cat([found[start] for start in sorted(found)]) for of, found in parts.items()}
