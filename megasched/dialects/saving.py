"""Puts the weights of a built model together again: as whole tensors, and as an HF folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from megasched.definition.build import original_cache
from megasched.dialects.stages import StageModule
from megasched.errors import ConfigError, some_of
from megasched.files import whole_folder
from megasched.language.lora import adapter_names
from megasched.lowering.build import is_built, placements_in_state_dict, plan_of
from megasched.lowering.groups import group_of
from megasched.lowering.lora import adapters_in
from megasched.plan.placement import Placement
from megasched.weights.lora import merge


def full_state_dict(model: nn.Module | Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Returns the whole tensors of a built model, by the definition's names, on the CPU of rank 0; elsewhere {}.

    Every rank calls it. Tensors are gathered one by one over the ranks that share them. Vocabularies have no
    padding, and a tied parameter stands under each of its names. What the definition does not have stands under
    the names of the built model: adapters, and what a function of ``replace`` has made.

    Args:
        model: what ``build`` or ``build_stage`` returned, or all stages of this rank; under DDP the one inside.
            ``fully_shard`` may have sharded it.

    Raises:
        ConfigError: the model was not built, or is a copy of one that was; or has got another parameter since; or
            DeepSpeed's ZeRO-3 has its weights.
    """
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    for chunk in chunks:
        refuse_others(chunk)
    if isinstance(chunks[0], StageModule):
        return _of_all_stages(chunks)
    return dict(_gathered(chunks[0], "", keep=_first()))


def save_pretrained(model: nn.Module | Sequence[nn.Module], folder: str | Path, **options: Any) -> None:
    """Writes a built HF model as a folder that ``from_pretrained`` loads, with the definition's own method.

    Every rank calls it; rank 0 has the whole model on its CPU and writes. The folder is there once it is complete.
    Adapters are merged into the weights of their linears.

    Args:
        model: as for ``full_state_dict``.
        folder: empty, or not there yet.
        options: of the definition's ``save_pretrained``, such as ``max_shard_size``.

    Raises:
        ConfigError: on all ranks: as ``full_state_dict``; or it is no HF model; or a replacement drops tensors of
            the definition, or has others; or the folder can't be written.
    """
    chunk = model if isinstance(model, nn.Module) else model[0]
    definition: Any = chunk.definition if isinstance(chunk, StageModule) else chunk
    if not hasattr(definition, "save_pretrained"):
        what = f"a {type(definition).__name__} is no model of transformers, which has save_pretrained"
        raise ConfigError(f"{what}: save what megasched.full_state_dict returns")
    _refuse_other_tensors(chunk)
    with ExitStack() as stack:
        beside = _on_the_first(lambda: stack.enter_context(whole_folder(Path(folder))))
        state = full_state_dict(model)
        if state:
            _merge_adapters(state, chunk, definition)
        with original_cache(definition):
            _on_the_first(lambda: definition.save_pretrained(beside, state_dict=state, **options))
        _on_the_first(stack.close)


def refuse_others(model: nn.Module) -> None:
    """Raises ConfigError for a model whose tensors can't be put together."""
    if not is_built(model):
        what = f"this {type(model).__name__} was not built by megasched, or is a copy of a model that was"
        raise ConfigError(f"{what}; of what DDP wraps, give .module")
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ConfigError(
            "DeepSpeed's ZeRO-3 has the weights: save a checkpoint by the engine, make a universal one of it "
            "(ds_to_universal), and export that (megasched export)"
        )
    placements = placements_in_state_dict(model)
    for name, _ in model.named_parameters():
        if name not in placements:
            raise ConfigError(
                f"{name}: it is not of the model that was built, so that nobody knows what a rank has"
            )


def _refuse_other_tensors(model: nn.Module) -> None:
    """Raises ConfigError for a model that does not have all tensors of its definition, and no others."""
    if not is_built(model):
        return
    replaced = plan_of(model).replaced
    if others := sorted(replaced.lost | replaced.lost_buffers | replaced.made):
        raise ConfigError(
            f"a replacement drops {some_of(others)} or makes it anew, so that from_pretrained would load another "
            "model; save what megasched.full_state_dict returns"
        )


def _merge_adapters(state: dict[str, torch.Tensor], model: nn.Module, definition: nn.Module) -> None:
    """Puts weights that compute the same as the adapted linears in the place of theirs and their adapters'."""
    saved_as = plan_of(model).replaced.saved_as
    for path, lora in adapters_in(definition).items():
        weight = saved_as.get(f"{path}.weight", f"{path}.weight")
        a, b = (state.pop(name) for name in adapter_names([path]))
        state[weight] = merge(state[weight], a, b, lora)


def _gathered(model: nn.Module, below: str, *, keep: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Gathers the tensors of a state dict, and yields them on a rank that keeps them.

    Args:
        below: what stands before the plan's names in the model's, and is left out.
        keep: whether this rank does; it is then the first of those that share a tensor.
    """
    placements, saved_as = placements_in_state_dict(model), plan_of(model).replaced.saved_as
    known: dict[int, torch.Tensor | None] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            continue
        if id(tensor) not in known:  # a tied one is gathered once
            local = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            known[id(tensor)] = _whole(local.detach(), placements.get(name), keep=keep)
        if (found := known[id(tensor)]) is not None:
            own = name.removeprefix(below)
            yield saved_as.get(own, own), found


def _whole(local: torch.Tensor, placement: Placement | None, *, keep: bool) -> torch.Tensor | None:
    """Returns the HF tensor of which each rank of a group has a shard, on the CPU of a rank that keeps it."""
    shards = [local]
    if placement is not None and placement.sharded:
        group = group_of(placement.group)
        if group.size() > 1:
            local = local.contiguous()
            shards = [torch.empty_like(local) for _ in range(group.size())] if group.rank() == 0 else []
            distributed.gather(local, shards or None, group=group, group_dst=0)
    if not keep:
        return None
    on_cpu = [shard.cpu() for shard in shards]
    whole = on_cpu[0] if placement is None else placement.unshard(on_cpu)
    return whole.clone(memory_format=torch.contiguous_format)


def _of_all_stages(chunks: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Gathers each stage on a rank of its own, and all of them on rank 0, which returns them; elsewhere {}."""
    from megatron.core import parallel_state

    group = parallel_state.get_pipeline_model_parallel_group()
    keep = 0 in distributed.get_process_group_ranks(group)
    held = {name: one for chunk in chunks for name, one in _gathered(chunk, "definition.", keep=keep)}
    if not keep:
        return {}
    by_nccl = distributed.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if by_nccl else torch.device("cpu")
    every: list[Any] = [None] * group.size()
    distributed.all_gather_object(every, {name: (one.shape, one.dtype) for name, one in held.items()}, group=group)
    if group.rank() > 0:
        for tensor in held.values():
            distributed.send(tensor.to(device), group=group, group_dst=0)
        return {}
    for stage, described in enumerate(every[1:], 1):
        for name, (shape, dtype) in described.items():
            received = torch.empty(shape, dtype=dtype, device=device)
            distributed.recv(received, group=group, group_src=stage)
            held[name] = received.cpu()
    return held


def _first() -> bool:
    return not distributed.is_initialized() or distributed.get_rank() == 0


def _on_the_first[Result](function: Callable[[], Result]) -> Result | None:
    """Calls a function on rank 0, and returns what it does there; all ranks raise its error."""
    result, error = None, None
    if _first():
        try:
            result = function()
        except Exception as raised:
            error = raised
    said = [None if error is None else f"rank 0 could not save the model: {error}"]
    if distributed.is_initialized():
        distributed.broadcast_object_list(said, src=0)
    if error is not None:
        raise error
    if said[0] is not None:
        raise ConfigError(said[0])
    return result
