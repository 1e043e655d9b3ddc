"""Checks what is built and how it is called: by which trainer, and for which outputs. Copies of it are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from megasched.analysis.recording.meta_call import tensors_in
from megasched.definition.attention_interface import NAMES
from megasched.errors import ConfigError, Problem, ScheduleError
from megasched.language.parallel_dims import ParallelDims
from megasched.language.records import caller_source
from megasched.transformers_names import ATTENTION

# All modules of models that were built, or half so where that has failed.
_lowered: WeakSet[nn.Module] = WeakSet()


class ReplicaCheck:
    """Forward pre-hook of a built model: looks at its first call who averages or shards its parameters.

    DDP over all ranks, as HF's Trainer and accelerate wrap a model, writes the first rank's shards over those of
    the others, and its losses look plausible.
    """

    def __init__(self, experts: frozenset[str]) -> None:
        """Stores the names of the parameters that EP shares out, which no trainer may take for replicas."""
        self.experts, self.done = experts, False

    def __call__(self, model: nn.Module, args: Any) -> None:
        """Checks the first call.

        Raises:
            ConfigError: DDP or FSDP2 spans other ranks than Megatron's data-parallel group, with context
                parallelism or without, or FSDP2 shards what EP shares out.
        """
        if self.done:
            return
        self.done = True
        replicas = distributed.get_process_group_ranks(_replicas())
        for trainer, ranks in _spans(model).items():
            if not set(ranks) <= set(replicas):
                what = f"{trainer} takes ranks {ranks} for replicas of this model"
                raise ConfigError(f"{what}, and those with its shards are {replicas}; {_REMEDY}")

        if (taken := _experts_taken(model, self.experts)) is not None:
            what = f"{taken[0]} takes {taken[1]} for the same on all data-parallel ranks, and EP shares it out"
            raise ConfigError(f"{what}; {_LEFT_TO_THE_MODEL}")


def _replicas() -> distributed.ProcessGroup:
    """Returns the ranks that have the same parameters and, once a backward is over, gradients to be averaged.

    Those that share a sequence have the same gradients by then, of which the mean is what each has.
    """
    from megatron.core import parallel_state

    found: distributed.ProcessGroup = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return found


_LEFT_TO_THE_MODEL = (
    "the model sums these gradients itself: build it anew, have DDP wrap it and no module around it, and give "
    "fully_shard(..., ignored_params={p for p in model.parameters() if not getattr(p, 'allreduce', True)})"
)
_REMEDY = (
    "its weights are mixed up: build it anew, and wrap it over parallel_state.get_data_parallel_group(). HF's "
    "Trainer and accelerate wrap over all ranks, and can't train a model that is cut over TP"
)


def _spans(model: nn.Module) -> dict[str, list[int]]:
    """Returns the ranks over which DDP and FSDP2 have a model."""
    found = {}
    ddp = DistributedDataParallel._active_ddp_module
    if ddp is not None and any(module is model for module in ddp.modules()):
        found["DDP"] = distributed.get_process_group_ranks(ddp.process_group)
    sharded = next((one for one in model.parameters() if isinstance(one, DTensor)), None)
    if sharded is not None:
        found["FSDP2"] = sharded.device_mesh.mesh.flatten().tolist()
    return found


def _experts_taken(model: nn.Module, experts: frozenset[str]) -> tuple[str, str] | None:
    """Returns the trainer that takes shared-out experts for replicas, and a parameter; None where none does."""
    held = {name: parameter for name, parameter in model.named_parameters() if name in experts}
    averaged = set[int]()
    ddp = DistributedDataParallel._active_ddp_module
    if ddp is not None:
        names = ddp.module.named_parameters()
        averaged = {id(parameter) for name, parameter in names if name not in ddp.parameters_to_ignore}
    for name, parameter in held.items():
        if isinstance(parameter, DTensor) or id(parameter) in averaged:
            return "FSDP2" if isinstance(parameter, DTensor) else "DDP", name
    return None


def note_lowered(model: nn.Module) -> None:
    """Notes that a build changes a model, which is no definition any more, also where the build fails."""
    _lowered.update(model.modules())


def refuse_built(model: nn.Module) -> None:
    """Raises ScheduleError for a model of which a build has changed modules."""
    path = next((path for path, module in model.named_modules() if module in _lowered), None)
    if path is not None:
        what = "the model is built already, or its build has failed half way"
        remedy = "make all calls on one schedule, of a model that is made anew"
        raise ScheduleError(Problem(what, path, caller_source(), remedy))


def refuse_unnamed(inputs: Any) -> None:
    """Raises ScheduleError for example arguments without names."""
    if inputs is None or (isinstance(inputs, Mapping) and all(isinstance(name, str) for name in inputs)):
        return
    what = f"inputs= is a {type(inputs).__name__}, and takes the arguments of the model's forward by their names"
    raise ScheduleError(Problem(what, source=caller_source(), remedy='inputs={"x": x}'))


def refuse_copies(model: nn.Module) -> None:
    """Has ``copy.deepcopy`` refused for a model that was just built, and for modules of it that would be wrong.

    Forwards that were wrapped or fused, and hooks, know the module that they are of, and would read its parameters
    in a copy.
    """
    changed = {path for path, module in model.named_modules() if _calls_more(module)}
    around = {path[:end] for path in changed for end, letter in enumerate(path) if letter == "."}
    for path in {"", *changed, *around}:
        model.get_submodule(path).__deepcopy__ = _refused  # type: ignore[assignment]


def _calls_more(module: nn.Module) -> bool:
    """Returns whether calling a module runs more than the code of its class."""
    return bool("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks)


def _refused(memo: Any) -> Any:
    raise ConfigError(
        "a model that megasched built can't be copied, nor what it has changed in it: layers of the copy would "
        "compute with the parameters of the first. Copy it before create_schedule and build both; for averages of "
        "weights copy the parameters"
    )


def refuse_second_derivatives(model: nn.Module, layout: ParallelDims) -> None:
    """Has backward passes through a model that was just built refuse ``create_graph=True``.

    They sum in place over the ranks that share the model, which a backward through them would not know of.
    """

    def watch(model: nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(_refuse_graph)

    if max(layout.tp, layout.cp, layout.ep) > 1:
        model.register_forward_hook(watch)


def _refuse_graph(gradient: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        raise ConfigError(
            "create_graph=True: gradients of gradients would be wrong, as sums over TP, CP or EP ranks in a "
            "backward pass have no gradient of their own. Take them of a model that is not cut"
        )


def refuse_unplanned_outputs(model: nn.Module, layout: ParallelDims) -> None:
    """Has each call of a model that was just built refuse what its config did not ask for when it was planned.

    transformers records it within layers by hooks. Unplanned attentions are those of a rank's heads, or none where
    a run's attention is called, and an auxiliary loss over parts of a sequence has a wrong gradient.
    """
    fused = getattr(getattr(model, "config", None), ATTENTION, None) in NAMES
    parts = {"output_attentions": fused or layout.tp > 1, "output_router_logits": layout.sp}
    flags = [flag for flag, part in parts.items() if part and not asks_for(model, {}, flag)]

    def refuse(model: nn.Module, args: tuple[Any, ...], arguments: Mapping[str, Any]) -> None:
        for flag in flags:
            if asks_for(model, arguments, flag):
                raise ConfigError(
                    f"{flag}: the model was planned without it; set model.config.{flag} = True before "
                    "create_schedule"
                )

    if flags:
        model.register_forward_pre_hook(refuse, with_kwargs=True)


def asks_for(model: Any, arguments: Mapping[str, Any], flag: str) -> bool:
    """Returns whether a call with the arguments, or else the model's config, asks for the output."""
    asked = arguments.get(flag)
    return bool(getattr(getattr(model, "config", None), flag, False) if asked is None else asked)
