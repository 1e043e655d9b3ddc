"""Decides whether a definition's attention can be ours: called by name, and computing what ours does.

transformers looks attention up by the name in the config (``AttentionInterface``). Its own names mean softmax
attention. ``eager`` means the class's own function, and a name that somebody else has registered means their
function: such a function is tried with numbers, or called unchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from megasched.analysis.recording.checks import pass_checks, state_of
from megasched.analysis.recording.meta_call import call_hooks, meta_copy, run_on_meta, to_meta
from megasched.attributes import replaced
from megasched.definition.attention_interface import EAGER_MASK, NAME, NAMES, registered, use_attention
from megasched.definition.instances import close, gradients_of, real_tensors
from megasched.definition.objectives import objective_of
from megasched.definition.undisturbed import undisturbed
from megasched.errors import ScheduleError
from megasched.transformers_names import ATTENTION

OWN = "eager"
_SCALES = (1.0, 8.0)
_TOLERANCE = 1e-4
_LARGE = 2**22  # elements; parameters of an attention module that its function reads are small
_SIZES = ((2, 5), (1, 67))  # of batches that are tried: a function may go by how many tokens there are


def attention_name(model: Any) -> str:
    """Returns the name under which a definition is to call our attention.

    A class that HF runs only with its eager attention gets eager's masks. It may not say that a module is causal,
    and may widen a mask as only an additive one can be.
    """
    return NAME if getattr(model, "_supports_sdpa", True) else EAGER_MASK


def enable(model: Any, inputs: Mapping[str, Any] | None = None) -> Callable[[], None]:
    """Makes a definition call a run's attention, if it calls attention by a name and that computes the same.

    Args:
        inputs: keyword arguments of its forward; by default those of a trial.

    Returns:
        A function that restores the names.
    """
    configs = _configs(model)
    before = [getattr(config, ATTENTION) for config in configs]

    def restore() -> None:
        for config, name in zip(configs, before, strict=True):
            setattr(config, ATTENTION, name)

    if not configs or not all(map(_is_known, before)):
        return restore
    name = attention_name(model)
    if is_used(model, name, inputs) and not _computes_another(model, name, inputs):
        _name_everywhere(model, name)
    return restore


def _is_known(name: str | None) -> bool:
    """Returns whether the function under a name is the class's own or transformers' attention."""
    from transformers import AttentionInterface

    if name is None or name == OWN or name in NAMES:
        return True
    function = AttentionInterface().get(name)
    return function is None or str(getattr(function, "__module__", "")).startswith("transformers.")


def _configs(model: nn.Module) -> list[Any]:
    """Returns every config that a part of the model reads: the stacks of an encoder-decoder have copies."""
    held = [getattr(module, "config", None) for module in model.modules()]
    return list({id(config): config for config in held if hasattr(config, ATTENTION)}.values())


def _name_everywhere(model: nn.Module, name: str) -> None:
    for config in _configs(model):
        setattr(config, ATTENTION, name)


def is_used(model: nn.Module, name: str = NAME, inputs: Mapping[str, Any] | None = None) -> bool:
    """Returns whether a definition calls attention through the interface, by a trial call on meta.

    Some classes accept any implementation name and silently compute something else, so the name is switched only
    where the function is called.
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        raise _Called

    try:
        with use_attention(called):
            _run(_probe(model, name), inputs)
    except _Called:
        return True
    except ScheduleError:  # under the new name it goes a way that it does not know
        return False
    return False


class _Called(BaseException):
    """Ends a trial call at the first attention; as a ``BaseException``, no handler of errors catches it."""


def _probe(model: nn.Module, name: str) -> nn.Module:
    probe = meta_copy(model)
    _name_everywhere(probe, name)
    return probe


def _run(probe: Any, inputs: Mapping[str, Any] | None) -> None:
    if inputs is None:
        inputs = objective_of(probe).trial_inputs(probe.config, *_SIZES[0])
    inputs = to_meta(dict(inputs))
    try:
        with call_hooks(probe):
            run_on_meta(probe, inputs)
    except ScheduleError:
        if not pass_checks(probe, inputs):
            raise
        _run(probe, inputs)


def _computes_another(model: nn.Module, name: str, inputs: Mapping[str, Any] | None) -> bool:
    """Returns whether some module's own (eager) attention is not shown to compute what ours does."""
    before = {path: getattr(module, "config", None) for path, module in model.named_modules()}
    real = registered()
    own = {path for path, config in before.items() if getattr(config, ATTENTION, "") in (OWN, None)}
    if not own:
        return False
    probe = _probe(model, name)
    callers = {id(module) for path, module in probe.named_modules() if path in own}
    default: list[Callable[..., Any]] = []  # of the call that is next
    tried: dict[Any, bool] = {}

    def ours(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        function = default.pop() if default else None
        kind = (function, state_of(module), form_of((args, kwargs)))
        if id(module) in callers and kind not in tried:
            tried[kind] = function is not None and _agree(function, real, module, args, kwargs)
            if not tried[kind]:
                raise _Other
        return real(module, *args, **{**kwargs, "dropout": 0.0})

    try:
        with use_attention(ours), _defaults_seen(default):
            _run(probe, inputs)
            longer = objective_of(probe).trial_inputs(getattr(probe, "config", None), *_SIZES[1])
            with suppress(ScheduleError):  # more than it has positions for, or not all that it is to be given
                _run(probe, longer if inputs is None else {**inputs, **longer})
    except (_Other, ScheduleError):
        return True
    return False


class _Other(BaseException):
    """Ends a trial call at attention of another kind; see ``_Called``."""


@contextmanager
def _defaults_seen(seen: list[Callable[..., Any]]) -> Iterator[None]:
    """Runs its body and notes the function that a class would call if its config said ``eager``."""
    from transformers import AttentionInterface

    real = AttentionInterface.get_interface

    def get_interface(self: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        seen[:] = [default]
        return real(self, name, default)

    with replaced(AttentionInterface, "get_interface", get_interface):
        yield


def form_of(arguments: Any) -> tuple[Any, ...]:
    """Returns the structure of arguments, and what each is: of a tensor its shape and dtype."""
    leaves, structure = torch.utils._pytree.tree_flatten(arguments)
    told = [(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else repr(x) for x in leaves]
    return str(structure), tuple(told)


def _agree(
    function: Callable[..., Any],
    ours: Callable[..., Any],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> bool:
    """Returns whether two functions give equal outputs and gradients for random tensors of these shapes."""
    kwargs = {**kwargs, "dropout": 0.0}
    with undisturbed(module), real_tensors(), torch.enable_grad():
        for scale in _SCALES:
            try:
                real = _Real(scale)
                given = real.arguments(module, args, kwargs)
                found = real.run(function, *given)
            except Exception:  # of whatever kind: what can't be called so is something else
                return False
            expected = real.run(ours, *given)
            if not all(close(one, other, _TOLERANCE) for one, other in zip(found, expected, strict=True)):
                return False
    return True


class _Real:
    """Makes random tensors in place of those on meta, always the same one for each."""

    def __init__(self, scale: float) -> None:
        self.scale, self.made = scale, dict[int, torch.Tensor]()
        self.generator = torch.Generator().manual_seed(0)

    def arguments(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[nn.Module, Any, Any]:
        """Returns the calling module, with real parameters and buffers, and real arguments of its attention."""
        here = copy.copy(module)
        own = {name: self.of(held) for name, held in module._parameters.items() if held is not None}
        buffers = {name: self.of(held) for name, held in module._buffers.items() if held is not None}
        here.__dict__ = {
            **vars(module),
            "_parameters": {**module._parameters, **own},
            "_buffers": {**module._buffers, **buffers},
        }
        query, key, value, mask, *more = args
        given = torch.utils._pytree.tree_map_only(torch.Tensor, self.of, (query, key, value, more, kwargs))
        query, key, value, more, kwargs = given
        with torch.no_grad():
            query.mul_(self.scale)
        return here, (query, key, value, self._mask(mask, kwargs.get("indices")), *more), kwargs

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self.made:
            if tensor.numel() > _LARGE:
                raise ValueError("too large to be tried")
            if tensor.is_floating_point():
                made = torch.randn(*tensor.shape, generator=self.generator).to(tensor.dtype)
                made.requires_grad_()
            else:
                last = tensor.shape[-1] if tensor.dim() else 1
                made = torch.arange(last).to(tensor.dtype).expand(tensor.shape)
            self.made[id(tensor)] = made
        return self.made[id(tensor)]

    def _mask(self, mask: torch.Tensor | None, indices: torch.Tensor | None) -> torch.Tensor | None:
        """Returns a causal mask that leaves out more keys, in the form of the definition's own.

        Keys that are not selected are left out, too, as transformers' definitions do for functions that take no
        ``indices``.
        """
        if mask is None:
            return None
        queries, keys = mask.shape[-2:]
        seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        seen[keys // 2 :, 0] = False
        if indices is not None:
            seen[:, indices.shape[-1] :] = False  # the first ones are selected; see ``of``
        seen = seen.expand(mask.shape)
        if mask.dtype == torch.bool:
            return seen.clone()
        return torch.zeros(mask.shape, dtype=mask.dtype).masked_fill(~seen, torch.finfo(mask.dtype).min)

    def run(self, function: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """Returns a function's output, and the output's gradients for every tensor made here."""
        output = function(module, *args, **kwargs)[0]
        sources = [tensor for tensor in self.made.values() if tensor.requires_grad]
        found = zip(gradients_of(output, sources), sources, strict=True)
        return [output.detach(), *(torch.zeros_like(of) if grad is None else grad for grad, of in found)]
