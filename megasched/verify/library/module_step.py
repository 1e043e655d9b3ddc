"""Runs one training step of any module, scheduled or not, and keeps every number of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from megasched.plan.placement import Placement
from megasched.verify.plain.draws import MeanDraws
from megasched.verify.plain.runs import OPTIMIZER
from megasched.verify.plain.watching import Sightings, Watch, silence
from megasched.verify.recording import RankReport
from megasched.verify.reference import largest

SEED = 1234
_RANKS = ("tp_rank", "dp_rank", "pp_rank", "cp_rank", "ep_rank", "expert_dp_rank")
_PERIOD = 1009  # of the weights of a projection: small integers, of which float32 and float64 have one cosine


@dataclass(frozen=True)
class Example:
    """Describes what a module is run on.

    Attributes:
        inputs: arguments of its forward by name.
        loss: makes a scalar of its output.
    """

    inputs: Mapping[str, Any]
    loss: Callable[[Any], torch.Tensor]

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Example:
        """Returns the example with each tensor changed."""
        return replace(self, inputs=tree_map_only(torch.Tensor, change, dict(self.inputs)))

    @property
    def samples(self) -> int:
        """Returns the length of the first tensor; 1 without one."""
        return next((len(one) for one in self.inputs.values() if isinstance(one, torch.Tensor) and one.dim()), 1)


@dataclass
class ModuleStep(RankReport):
    """Holds the numbers of one step of a module on one rank.

    Attributes:
        gradients, weights, buffers: name -> (what this rank holds, its placement).
        outputs: floating-point tensors of the whole batch's output by name.
        changes: largest change of each weight.
        trained: names of the parameters that require a gradient.
        silenced: modules whose dropout was on.
        drawn: whether code drew random numbers, whose mean it was given.
    """

    buffers: dict[str, tuple[torch.Tensor, Placement]] = field(default_factory=dict)  # type: ignore[assignment]
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    changes: dict[str, float] = field(default_factory=dict)
    trained: frozenset[str] = frozenset()
    silenced: list[str] = field(default_factory=list)
    drawn: bool = False


def take_step(
    model: nn.Module,
    example: Example,
    rank: RankReport,
    placements: Mapping[str, Placement],
    replicas: Any = None,
    names: Mapping[str, str] = MappingProxyType({}),
) -> ModuleStep:
    """Runs forward, backward and a step of AdamW, with dropouts off; the module's weights change.

    Args:
        rank: has this rank's numbers.
        placements: name -> how a parameter or buffer lies over TP; whole where there is none.
        replicas: the data-parallel group, where there are several such ranks; each runs its own samples.
        names: name in the model -> name in the unscheduled one, where it differs.
    """
    silenced, parameters = silence(model), dict(model.named_parameters())
    start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    watch = Watch(model, [path for path, _ in model.named_modules() if path])
    drawing = MeanDraws()
    with _seeded(), drawing, torch.enable_grad():
        own = example.mapped(lambda tensor: tensor.detach().clone())  # a module may write into its input
        output = _of_whole_batch(model(**own.inputs), replicas)
        loss = example.loss(output)
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
    seen = watch.close()  # not before: code that runs again in the backward may ask whether a module has hooks
    for parameter in parameters.values():
        if parameter.grad is None or replicas is None:
            continue
        if getattr(parameter, "allreduce", True):
            torch.distributed.all_reduce(parameter.grad, group=replicas)
        else:  # an expert that EP shares out, whose gradient the model has made the mean over replicas
            parameter.grad *= replicas.size()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters.items()}
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    if trained:
        options = {name: OPTIMIZER[name] for name in ("lr", "betas", "eps", "weight_decay")}
        torch.optim.AdamW(trained.values(), **options).step()
    changes = {n: largest(p.detach() - start[n]) for n, p in parameters.items()}

    def placed(values: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, Placement]]:
        held = _on_cpu(values)
        found = {name: (value, placements.get(name) or Placement(name, (*value.shape,))) for name, value in held}
        return {names.get(name, name): (value, lies) for name, (value, lies) in found.items() if lies.name == name}

    return ModuleStep(
        **{name: getattr(rank, name) for name in _RANKS},
        losses=[float(loss.detach())],
        gradients=placed(gradients),
        weights=placed(parameters),
        buffers=placed(dict(model.named_buffers())),
        sightings=Sightings(seen.order, dict(_on_cpu(seen.values)), dict(_on_cpu(seen.gradients)), seen.sources),
        outputs=dict(_on_cpu(outputs_of(output))),
        changes={names.get(name, name): change for name, change in changes.items()},
        trained=frozenset(names.get(name, name) for name in trained),
        silenced=silenced,
        drawn=drawing.drawn,
    )


def _on_cpu[Key](tensors: Mapping[Key, torch.Tensor]) -> list[tuple[Key, torch.Tensor]]:
    return [(key, tensor.detach().cpu().clone()) for key, tensor in tensors.items()]


@contextmanager
def _seeded() -> Iterator[None]:
    """Runs its body with torch's random numbers from one seed on, and restores all random states."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    states = tracker.get_states() if tracker.is_initialized() else None
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
        torch.manual_seed(SEED)
        try:
            yield
        finally:
            if states is not None:  # setting none would have layers draw from states that nobody made
                tracker.set_states(states)


def _of_whole_batch(output: Any, replicas: Any) -> Any:
    """Joins the outputs of all replicas, of which this one's alone carry a gradient; scalars are averaged.

    The loss of the whole batch then gives each replica its share of every gradient, and the sum is the whole.
    """
    if replicas is None:
        return output

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        every = [torch.empty_like(tensor) for _ in range(replicas.size())]
        torch.distributed.all_gather(every, tensor.detach().contiguous(), group=replicas)
        every[replicas.rank()] = tensor
        return torch.cat(every) if tensor.dim() else torch.stack(every).mean()

    return tree_map_only(torch.Tensor, whole, output)


def own_loss(output: Any) -> torch.Tensor:
    """Returns the output's own loss; without one, a fixed projection of all its tensors to a number."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    total = torch.zeros(())
    for tensor in outputs_of(output).values():
        weights = (torch.arange(tensor.numel(), device=tensor.device) % _PERIOD).cos().reshape(tensor.shape)
        total = total.to(tensor.device) + (tensor * weights).sum() / max(tensor.numel(), 1) ** 0.5
    return total


def outputs_of(output: Any, name: str = "output") -> dict[str, torch.Tensor]:
    """Returns the floating-point tensors of an output by name: ``logits``, ``hidden_states[1]``."""
    if isinstance(output, torch.Tensor):
        return {name: output} if output.is_floating_point() else {}
    inner: dict[str, Any] = {}
    if isinstance(output, Mapping):
        inner = {str(key): value for key, value in output.items()}
    elif isinstance(output, tuple | list):
        inner = {f"{name}[{index}]": value for index, value in enumerate(output)}
    return {key: tensor for at, value in inner.items() for key, tensor in outputs_of(value, at).items()}
