"""The library's door: a schedule of a model in hand, with what an adapter knows of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megasched.errors import ConfigError
from megasched.language import schedule as tree
from megasched.language.schedule_file import apply_schedule as call_schedule
from megasched.language.schedule_file import find_schedule

if TYPE_CHECKING:
    from torch import nn

    from megasched.language.parallel_dims import Layout
    from megasched.language.roles import Roles
    from megasched.language.schedule import Schedule


def create_schedule(model: nn.Module, layout: Layout | None = None, roles: Roles | None = None) -> Schedule:
    """An empty schedule of any ``nn.Module``; the model is not changed before ``build``.

    Args:
        model: HF or not, real or deferred by ``init_empty_weights``.
        layout: how the job is spread; by default what Megatron's process groups in this process say.
        roles: what is known of its modules; by default what an adapter knows of an HF model.
    """
    return tree.create_schedule(model, layout, roles if roles is not None else _known_roles(model))


def apply_schedule(model: nn.Module, name: str, *, inputs: dict[str, Any] | None = None) -> nn.Module:
    """Creates a schedule of the model, fills it with the one that ``name`` names, and builds it.

    Args:
        model: as for ``create_schedule``.
        name: ``auto``, a schedule file, ``FILE:name``, or a name given to ``register_schedule``.
        inputs: as for ``build``.
    """
    from megasched.lowering.build import build

    sch = create_schedule(model)
    call_schedule(sch, find_schedule(name))
    return build(sch, inputs=inputs)


def _known_roles(model: nn.Module) -> Roles | None:
    if not hasattr(model, "config") or not hasattr(model, "tp_plan"):
        return None
    from megasched.model_adapters.registry import roles_of

    try:
        return roles_of(model)
    except ConfigError:
        return None  # a model that no adapter knows can still be scheduled by hand
