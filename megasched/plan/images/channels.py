"""Places the tensors of convolutions and batch norms that are cut, buffers included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from megasched.definition.images.convolutions import (
    cut_axes,
    cut_of_convolution,
    group_width,
    is_batch_norm,
    is_channelwise,
    is_convolution,
    is_grouped,
    output_channels,
)
from megasched.errors import Problem
from megasched.language.records import Record
from megasched.language.roles import Cut
from megasched.plan.placement import Placement
from megasched.plan.plan import Plan


def placements_of(
    path: str, module: nn.Module, cut: Cut, canonical: Mapping[str, str], components: tuple[int, ...] = ()
) -> dict[str, Placement]:
    """Maps the full name of each tensor that is cut, of a convolution or a batch norm, to its placement.

    Args:
        canonical: name of a parameter -> its canonical name; a buffer has its own.
        components: sizes of the components of the channels that are cut; of a grouped convolution, those it takes.
    """
    held = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    found = {}
    for name, axis in cut_axes(module, cut).items():
        full, shape = f"{path}.{name}" if path else name, tuple(held[name].shape)
        sizes = tuple(size * shape[axis] // sum(components) for size in components)
        found[full] = Placement(canonical.get(full, full), shape, axis=axis, components=sizes)
    return found


def cut_channels(plan: Plan, model: nn.Module) -> Plan:
    """Returns the plan with what a labelled run says of modules that take cut channels, and of no other."""
    base: dict[str, Cut] = {path: cut for path, cut in plan.cuts.items() if cut != "channels"}
    placements, canonical, cuts = dict(plan.placements), dict(plan.canonical), dict(base)
    for path in plan.cuts.keys() - base:
        for full in placements_of(path, model.get_submodule(path), "channels", canonical):
            placement = placements.pop(canonical.pop(full, full), None)
            if placement is not None and _is_parameter(model, full):
                canonical[full] = placement.name
                placements[placement.name] = Placement(placement.name, placement.shape)
    for path, components in plan.tp_facts.input_components.items():
        cuts[path] = base.get(path, "channels")
        for full, placement in placements_of(
            path, model.get_submodule(path), cuts[path], canonical, components
        ).items():
            canonical[full] = placement.name
            placements[placement.name] = placement
    order = dict.fromkeys((*plan.canonical, *canonical))
    return replace(
        plan, cuts=cuts, placements=placements, canonical={n: canonical[n] for n in order if n in canonical}
    )


def _is_parameter(model: nn.Module, full: str) -> bool:
    path, _, name = full.rpartition(".")
    return name in model.get_submodule(path)._parameters


def channels_left_whole(plan: Plan, model: nn.Module, *, by_trainer: bool) -> set[str]:
    """Returns the paths of modules that take channels by themselves, and that are never cut with what they take.

    Their tensors are tied to others, or Megatron's trainer runs the model.
    """
    names = Counter(plan.canonical.values())
    found = set()
    for path, module in model.named_modules():
        if is_channelwise(module):
            own = (plan.canonical[f"{path}.{name}" if path else name] for name, _ in _own(module))
            if by_trainer or any(names[name] > 1 for name in own):
                found.add(path)
    return found


def _own(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(recurse=False))


def uneven_groups(plan: Plan, model: nn.Module) -> set[str]:
    """Returns the paths of modules among whose components TP divides the channels or groups of one not evenly."""
    found = set()
    for path, components in plan.tp_facts.input_components.items():
        module = model.get_submodule(path)
        width = group_width(module)
        _, taken = output_channels(module)
        if any(size // width % plan.layout.tp for size in components or (taken,)):
            found.add(path)
    return found


def cut_asked(module: nn.Module, record: Record) -> Cut | Problem:
    """Returns how a record cuts a convolution or a batch norm, or the problem with it."""
    param, axis, path = record.arguments["param"], record.arguments["axis"], record.path
    what = f"{type(module).__name__}.{param} can't be sharded along axis {axis}"
    if record.arguments.get("components"):
        what = "components are given for channels, which are followed through the code"
        return Problem(what, path, record.source, "leave components out")
    if is_batch_norm(module):
        return "channels"
    cut = cut_of_convolution(module, axis) if param == "weight" else None
    if cut is not None:
        return cut
    if param == "bias":
        return Problem(what, path, record.source, "shard the weight along its output channels; the bias follows")
    if is_grouped(module) and axis == 1:
        what += f": each of its {module.groups} groups adds up its own input channels"
        return Problem(what, path, record.source, 'shard("weight", axis=0), which cuts it by groups')
    what += ": that is a place of the kernel"
    return Problem(what, path, record.source, "axis 0 or 1: output and input channels")


def refuse_images(
    shards: Sequence[Record], plan: Plan, model: nn.Module, *, by_trainer: bool, with_inputs: bool
) -> list[Problem]:
    """Returns a problem for each record on convolutions or batch norms that can't be carried out here.

    Args:
        shards: the ``shard`` records that are sound by themselves.
        with_inputs: whether a run on example inputs will tell what meets the channels.
    """
    problems = []
    for record in plan.records_of("sync_batch_norm") if by_trainer else ():
        what = "statistics are shared by megasched.build; in Megatron's trainer each rank has its own"
        problems.append(Problem(what, record.path, record.source, "leave the call out"))
    for record in plan.records_of("sync_batch_norm"):
        for inner, module in model.get_submodule(record.path).named_modules():
            if isinstance(module, _BatchNorm) and not is_batch_norm(module):
                what = f"{type(module).__name__} {inner!r} computes or holds more than torch's batch norm does"
                remedy = "call it on the modules around the others"
                problems.append(Problem(what, record.path, record.source, remedy))
    for record in shards:
        module = model.get_submodule(record.path)
        if not (is_convolution(module) or is_batch_norm(module)):
            continue
        if by_trainer:
            what = "convolutions and batch norms are cut by megasched.build; Megatron's trainer keeps them whole"
            problems.append(Problem(what, record.path, record.source, "leave it whole"))
        elif not with_inputs:
            what = "nothing tells what its channels meet"
            remedy = "pass build(..., inputs={...}): example tensors for the model's forward"
            problems.append(Problem(what, record.path, record.source, remedy))
    return problems


def refuse_whole_inputs(plan: Plan, model: nn.Module, reasons: Container[str]) -> list[Problem]:
    """Returns a problem for each module that is to be cut by channels, and does not take cut ones.

    Args:
        reasons: paths of modules that stay whole for another reason than what they take.
    """
    problems = []
    for record in plan.records_of("shard"):
        module = model.get_submodule(record.path)
        asked = is_channelwise(module) and cut_asked(module, record) == "channels"
        if not asked or record.path in plan.tp_facts.input_components:
            continue
        what = "its channels can't be cut: what it takes is whole on every rank"
        remedy = 'shard the convolution before it by its outputs, shard("weight", axis=0), or leave this whole'
        if record.path in reasons:
            what = "its channels can't be cut: other code reads its tensors, they are tied, or TP does not divide "
            what, remedy = what + "its groups", "leave it whole"
        problems.append(Problem(what, record.path, record.source, remedy))
    return list({problem.module: problem for problem in problems}.values())
