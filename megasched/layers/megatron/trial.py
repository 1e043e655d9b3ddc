"""Tries with numbers whether Megatron's module computes the same as an instance of the definition's.

Small copies of both, with the same weights by the mapping that a run loads them with, get the same input; output
and gradients of input and parameters must agree. The trial runs on the CPU while a plan is made, in groups of one
rank: a module that is declined is planned at another level, and `show` says why before any GPU is used. Megatron's
own modules are used without Transformer Engine, whose tests cover its modules. Megatron is imported with this
module, so before CUDA is emulated: a run depends on what its modules find of CUDA at import.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.nn import functional as F

from megasched import patches
from megasched.attributes import set_attribute, undo_all
from megasched.definition.instances import gradients_of, real_tensors
from megasched.definition.module_copy import transfer_hooks
from megasched.definition.undisturbed import undisturbed
from megasched.language.module_specs import AttentionSpec, LayerSpec, MoeSpec
from megasched.language.parallel_dims import ParallelDims
from megasched.language.roles import Roles
from megasched.layers.build_context import BuildContext
from megasched.layers.megatron.attention import lower_attention
from megasched.layers.megatron.layer import lower_block
from megasched.layers.megatron.layer_calls import layer_calls
from megasched.layers.megatron.moe import lower_mixture
from megasched.layers.megatron.rotary import rotary_angles
from megasched.layers.megatron.small_copy import (
    HIDDEN,
    Sizes,
    attention_sizes,
    copy_tree,
    layer_sizes,
    make_small,
    mixture_sizes,
    replaced_in,
)
from megasched.plan.megatron.fit import TrialSubject
from megasched.plan.megatron.params import mixture_in
from megasched.plan.param_mapping import ParamMapping
from megasched.plan.placement import Placement
from megasched.plan.plan import Plan
from megasched.transformers_names import ATTENTION

BATCH, LENGTH = 2, 24
WINDOW = 7  # in the place of a longer one, so that there are tokens beyond it
_TOLERANCE = 3e-5  # of the largest number; of float32
_SMALL = 0.1  # of the largest gradient: what is smaller has its rounding
# Of inputs: small ones show the epsilon of norms. Gradients of parameters are compared at the first.
_SCALES = {"layer": (1.0, 1e-3, 30.0), "attention": (1.0, 0.1, 3.0), "mixture": (1.0, 3.0)}


def why_another(plan: Plan, model: nn.Module, subject: TrialSubject) -> str:
    """Returns how Megatron's module computes other numbers than the definition's, as text; empty if it doesn't."""
    try:
        with (
            _alone(),
            undisturbed(model),
            real_tensors(),
            torch.random.fork_rng(devices=[]),
            torch.enable_grad(),
            _constant_dropout(),
        ):
            return _compare(plan, model, subject)
    except Exception as error:  # whatever the definition's code raises
        return f"a small copy of it can't be tried: {type(error).__name__}: {error}".partition("\n")[0]


def _compare(plan: Plan, model: Any, subject: TrialSubject) -> str:
    structure = plan.stack
    index = structure.index_of(subject.path)
    assert index is not None
    windows = {None, _window(plan.roles, index)}
    roles, other = _with_short_windows(model, plan.roles)
    plan = replace(plan, roles=roles)
    windows.add(_window(roles, index))
    small = copy_tree(model.get_submodule(subject.layer), other)
    sizes = _sizes(plan, small, subject)
    attention = None if subject.kind == "mixture" else _attention(roles)
    make_small(small, sizes, attention.module if attention is not None else "")
    whole = _Model(model, subject.layer, small)
    args, kwargs = (
        ((), {}) if subject.kind == "mixture" else layer_calls(model, structure, other, BATCH, LENGTH)[index]
    )
    inner = subject.path[len(subject.layer) + 1 :]
    theirs = _CalledModule(small.get_submodule(inner).train(), subject.kind, structure.slot, small, args, kwargs)
    made, assemblies = _megatron(plan, whole, subject, sizes)
    transfer_hooks(theirs.module, made)
    ours = replace(theirs, module=made.train())
    with _windows_asked(model) as asked:
        for scale in _SCALES[subject.kind]:
            generator = torch.Generator().manual_seed(1)
            x = scale * torch.randn(BATCH, LENGTH, HIDDEN, generator=generator)
            reason = _unequal(theirs, ours, x, whole, assemblies if scale == 1 else {})
            if reason:
                return f"of inputs of size {scale:g}, its {reason} is another than Megatron's"
    others = asked - windows
    return (
        f"it asks for attention in a window of {others.pop()} tokens, and its layer has another" if others else ""
    )


def _attention(roles: Roles) -> AttentionSpec | None:
    found = roles.layer.attention if isinstance(roles.layer, LayerSpec) else roles.attention
    return found if isinstance(found, AttentionSpec) else None


def _window(roles: Roles, index: int) -> int | None:
    """Returns the attention window of a layer, or None."""
    attention = _attention(roles)
    return attention.windows[index] if attention is not None and attention.windows else None


def _sizes(plan: Plan, layer: nn.Module, subject: TrialSubject) -> Sizes:
    roles = plan.roles
    if subject.kind == "layer":
        assert isinstance(roles.layer, LayerSpec)
        return layer_sizes(layer, roles.layer, mixture_in(plan, subject.layer))
    if subject.kind == "attention":
        assert isinstance(roles.attention, AttentionSpec)
        return attention_sizes(layer, roles.attention)
    assert isinstance(roles.moe, MoeSpec)
    return mixture_sizes(layer, roles.moe)


class _Model:
    """Stands in for the definition as the source of values for Megatron's module, with one small layer."""

    def __init__(self, model: nn.Module, path: str, layer: nn.Module) -> None:
        self.model, self.path, self.layer = model, path, layer

    def get_submodule(self, path: str) -> nn.Module:
        if path == self.path or path.startswith(f"{self.path}."):
            return self.layer.get_submodule(path[len(self.path) + 1 :])
        return self.model.get_submodule(path)

    def get_parameter(self, name: str) -> nn.Parameter:
        return self.layer.get_parameter(name.removeprefix(f"{self.path}."))


@contextmanager
def _windows_asked(model: Any) -> Iterator[set[int | None]]:
    """Yields the set of windows that the definition passes to HF's attention function in its body.

    Some definitions rely on the mask alone.
    """
    from transformers import AttentionInterface

    name, asked = getattr(model.config, ATTENTION), set[int | None]()
    real = AttentionInterface().get(name)
    if real is None:  # eager is no function of HF's, but of each definition
        yield asked
        return

    def attend(*args: Any, **kwargs: Any) -> Any:
        asked.add(kwargs.get("sliding_window"))
        return real(*args, **kwargs)

    AttentionInterface.register(name, attend)
    try:
        yield asked
    finally:
        AttentionInterface.register(name, real)


def _with_short_windows(model: Any, roles: Roles) -> tuple[Roles, dict[int, Any]]:
    """Returns the roles with windows as short as the trial needs, and configs to match by their originals' ids."""
    attention = _attention(roles)
    known = set(attention.windows) if attention is not None else set()
    long = {window for window in known if window is not None and window > WINDOW}

    def field(name: str, value: Any) -> Any:
        return WINDOW if "window" in name and type(value) is int and value in long else value

    configs = {id(m.config): m.config for m in model.modules() if getattr(m, "config", None) is not None}
    other = {number: replaced_in(config, field) for number, config in configs.items()} if long else {}

    def short(attention: Any) -> Any:
        if not isinstance(attention, AttentionSpec):
            return attention
        return replace(attention, windows=tuple(WINDOW if w in long else w for w in attention.windows))

    block = roles.layer
    if isinstance(block, LayerSpec):
        block = replace(block, attention=short(block.attention))
    return replace(roles, layer=block, attention=short(roles.attention)), other


def _megatron(
    plan: Plan, model: Any, subject: TrialSubject, sizes: Sizes
) -> tuple[nn.Module, dict[str, ParamMapping]]:
    """Returns Megatron's module with the values of the small copy, and the mappings of its parameters."""
    context, path, roles = _context(_small_plan(plan, subject.layer, sizes)), subject.path, plan.roles
    if subject.kind == "mixture":
        assert isinstance(roles.moe, MoeSpec)
        made: nn.Module = lower_mixture(path, model, roles.moe, context)
    elif subject.kind == "attention":
        assert isinstance(roles.attention, AttentionSpec)
        angles = rotary_angles(model, roles.attention, None)
        made = lower_attention(path, model, roles.attention, angles, context)
    else:
        assert isinstance(roles.layer, LayerSpec)
        angles = rotary_angles(model, roles.layer.attention, None)
        made = lower_block(path, model.get_submodule(path), model, angles, context)
    for name, old in context.renamed_buffers.items():
        module, _, buffer = name.removeprefix(f"{path}.").rpartition(".")
        owner, _, leaf = old.rpartition(".")
        made.get_submodule(module)._buffers[buffer] = model.get_submodule(owner)._buffers[leaf].flatten()
    return made, {name.removeprefix(f"{path}."): assembly for name, assembly in context.assemblies.items()}


@contextmanager
def _alone() -> Iterator[None]:
    """Runs its body without a GPU or process groups.

    Megatron's modules ask for CUDA, which is emulated, so that a real GPU is not touched; and they keep the groups
    that they are given.
    """
    emulated = "host_cuda" in patches.active()
    if not emulated:
        patches.apply("host_cuda", force=True, quiet=True)
    target = "megatron.core.utils:get_tensor_model_parallel_group_if_none"
    stream = "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.cuda_dtoh_stream"
    undo = [
        set_attribute(target, lambda tp_group, *args, **kwargs: tp_group, rebind=("megatron",)),
        set_attribute(stream, None),  # made once for all, and this one is emulated
        # Transformer Engine's product, by which routers compute where it is installed: it is for GPUs alone.
        set_attribute("megatron.core.transformer.moe.moe_utils:te_general_gemm", None),
    ]
    try:
        yield
    finally:
        undo_all(undo)
        if not emulated:
            patches.undo("host_cuda")


def _small_plan(plan: Plan, layer: str, sizes: Sizes) -> Plan:
    """Returns a plan for one rank, with small parameters in one layer."""
    placements = {}
    for name, shape in sizes.items():
        canonical = plan.canonical[f"{layer}.{name}"]
        old = plan.placements[canonical]
        placement = Placement(canonical, shape, transposed=old.transposed)
        if old.components and old.axis is not None:
            count = sum(old.components)
            components = tuple(length * shape[old.axis] // count for length in old.components)
            placement = replace(placement, axis=old.axis, components=components)
        placements[canonical] = placement
    return replace(plan, layout=ParallelDims(), records=(), placements=placements)


def _context(plan: Plan) -> Any:
    alone = torch.distributed.ProcessGroup(0, 1)
    groups = ProcessGroupCollection()
    for field in fields(ProcessGroupCollection):
        setattr(groups, field.name, alone)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        params_dtype=torch.float32,
        use_cpu_initialization=True,
    )
    return BuildContext(
        plan=plan,
        group=alone,
        config=config,
        source=None,
        device=torch.device("cpu"),
        megatron_finalizes=True,
        process_groups=groups,
    )


@dataclass(frozen=True)
class _CalledModule:
    """Holds a module and how it is called with a hidden state [b, s, h]."""

    module: nn.Module
    kind: str
    slot: Any
    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "layer":
            args, kwargs = self.slot.put(x, self.args, self.kwargs)
            return self.slot.result(self.module(*args, **kwargs))
        output = self.module(x, **(self._handed_on() if self.kind == "attention" else {}))
        return output[0] if isinstance(output, tuple) else output

    def _handed_on(self) -> dict[str, Any]:
        """Returns those of the layer's arguments that its attention has a parameter for."""
        bound = inspect.signature(type(self.layer).forward).bind(self.layer, *self.args, **self.kwargs).arguments
        given = {**bound, **bound.get("kwargs", {})}
        hidden = self.slot.get(self.args, self.kwargs)
        names = inspect.signature(type(self.module).forward).parameters
        every = any(p.kind is p.VAR_KEYWORD for p in names.values())
        first = next(iter([name for name in names if name != "self"]))
        return {
            name: value
            for name, value in given.items()
            if name not in ("self", "kwargs", first) and value is not hidden and (every or name in names)
        }


def _unequal(
    theirs: _CalledModule, ours: _CalledModule, x: torch.Tensor, model: Any, assemblies: dict[str, ParamMapping]
) -> str:
    """Returns which of output and gradients differ, as text; empty if none does.

    Args:
        assemblies: mappings of Megatron's parameters whose gradients are compared, too.
    """
    own = {name: held for name, held in ours.module.named_parameters() if name in assemblies}
    parts = {name: [model.get_parameter(part.name) for part in assemblies[name].parts] for name in own}
    wanted = _results(theirs, x, [held for name in own for held in parts[name]])
    found = _results(ours, x, list(own.values()))
    if not _close(found[0], wanted[0]):
        return "output"
    if not _close(found[1], wanted[1]):
        return "gradient of the input"
    gradients = iter(wanted[2:])
    largest = max((float(gradient.abs().max()) for gradient in wanted[2:] if gradient.numel()), default=0.0)
    for name, gradient in zip(own, found[2:], strict=True):
        assembly = assemblies[name]
        cut = assembly.cut(0, 1)
        pieces = [part.shard(next(gradients), *cut) for part in assembly.parts]
        # Some are zero but for rounding: those of a router whose one weight for each token is 1.
        if not _close(gradient, assembly.join(pieces, 1), _SMALL * largest):
            return f"gradient of {assembly.name}"
    return ""


def _results(called: _CalledModule, x: torch.Tensor, held: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the output, and the gradients of input and parameters; zeros for missing ones."""
    x = x.clone().requires_grad_()
    output = called(x)
    sources = [x, *held]
    found = zip(gradients_of(output, sources), sources, strict=True)
    return [output, *(torch.zeros_like(of) if gradient is None else gradient for gradient, of in found)]


def _close(one: torch.Tensor, other: torch.Tensor, least: float = 0.0) -> bool:
    """Returns whether two tensors, which may be large, are equal up to rounding; NaN equals nothing.

    Args:
        least: size to which rounding is relative if the numbers themselves are smaller.
    """
    if one.shape != other.shape:
        return False
    if not one.numel():
        return True
    return bool((one - other).abs().max() <= _TOLERANCE * other.abs().max().clamp(min=least))


@contextmanager
def _constant_dropout() -> Iterator[None]:
    """Runs its body with dropout that scales all elements by the share that it keeps.

    So both sides reveal the places and probabilities of their dropout.
    """
    attend = F.scaled_dot_product_attention

    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return input * (1 - p) if training else input

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        **kw: Any,
    ) -> torch.Tensor:
        return attend(query, key, value, attn_mask, 0.0, **kw) * (1 - dropout_p)

    undo = [
        set_attribute("torch.nn.functional:dropout", dropout),
        set_attribute("torch.nn.functional:scaled_dot_product_attention", attention),
    ]
    try:
        yield
    finally:
        undo_all(undo)
