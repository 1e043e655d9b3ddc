"""What megasched must know of an HF architecture that it can't read off it; found by the config's model type.

An adapter is data first: globs over module paths give roles, and what a role needs beyond that follows from
the HF config. Third parties register theirs through the entry point group ``megasched.model_adapters``
(a module-level ``Adapter``, or a list of them).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from megasched.errors import ConfigError
from megasched.experts import find_experts
from megasched.model_adapters.blocks import block_of
from megasched.roles import Block, Roles

if TYPE_CHECKING:
    from torch import nn

GROUP = "megasched.model_adapters"


@dataclass(frozen=True)
class Adapter:
    """One family of architectures.

    Attributes:
        model_types: ``config.model_type`` values it is for, e.g. ``("gpt2",)``.
        roles: glob over module paths -> role, e.g. ``{"*.mlp.c_proj": "mlp.down"}``.
        packed: role -> function of the HF config that gives the sizes of the projections packed into it.
        local_attributes: glob over module paths -> attributes that count this rank's heads or features.
        block: says of a definition how Megatron's ``TransformerLayer`` can stand for its decoder layers (level
            ``block``), or why it can't; ``blocks.py`` by default.
    """

    model_types: tuple[str, ...]
    roles: Mapping[str, str]
    packed: Mapping[str, Callable[[Any], tuple[int, ...]]] = field(default_factory=dict)
    local_attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    block: Callable[[nn.Module], Block | str] = block_of

    def bind(self, model: nn.Module) -> Roles:
        """What this adapter says of one definition.

        Raises:
            ConfigError: a glob of the adapter matches no module, which means that the definition has moved on.
        """
        config: Any = model.config
        paths = [path for path, _ in model.named_modules()]
        role, origin = {}, {}
        for glob, name in self.roles.items():
            for path in self._matching(glob, paths, config):
                role[path], origin[path] = name, f"adapter: {glob} is {name}"
        components = {path: self.packed[name](config) for path, name in role.items() if name in self.packed}
        local = {
            path: names
            for glob, names in self.local_attributes.items()
            for path in self._matching(glob, paths, config)
        }
        heads = head_counts(role, config)
        return Roles(role, heads, components, local, origin, block=self.block(model))

    def _matching(self, glob: str, paths: list[str], config: Any) -> list[str]:
        found = [path for path in paths if fnmatch.fnmatchcase(path, glob)]
        if not found:
            raise ConfigError(
                f"the adapter for {config.model_type!r} expects modules {glob!r}, and the definition has none; "
                "this version of transformers is not the one that the adapter was written for"
            )
        return found


def head_counts(role: Mapping[str, str], config: Any) -> dict[str, int]:
    """Heads in the output of each projection to q, k or v, as HF configs count them."""
    queries = getattr(config, "num_attention_heads", None)
    keys = getattr(config, "num_key_value_heads", None) or queries
    counts = {"qkv.q": queries, "attn.out": queries, "qkv.k": keys, "qkv.v": keys, "qkv.packed": keys}
    return {path: counts[name] for path, name in role.items() if counts.get(name)}


@cache
def _adapters() -> dict[str, tuple[Adapter, str]]:
    found: dict[str, tuple[Adapter, str]] = {}
    for point in entry_points(group=GROUP):
        loaded = point.load()
        for adapter in [loaded] if isinstance(loaded, Adapter) else loaded:
            for model_type in adapter.model_types:
                if model_type in found:
                    raise ConfigError(
                        f"two adapters for model type {model_type!r}: {found[model_type][1]} and {point.value}"
                    )
                found[model_type] = (adapter, point.value)
    return found


def find_adapter(model_type: str) -> Adapter | None:
    """The adapter made by hand for this model type; None if there is none and the generic one serves."""
    found = _adapters().get(model_type)
    return found[0] if found else None


def roles_of(model: nn.Module) -> Roles:
    """What is known of a definition: by its own adapter, or else by HF's plan (see ``generic.py``).

    Raises:
        ConfigError: there is neither.
    """
    from megasched.model_adapters.generic import read_plan

    adapter = find_adapter(getattr(model.config, "model_type", ""))
    roles = adapter.bind(model) if adapter is not None else replace(read_plan(model), block=block_of(model))
    experts = dict.fromkeys(find_experts(model), "moe.experts")
    origin = dict.fromkeys(experts, "has the form of HF's experts")
    return replace(roles, role={**roles.role, **experts}, origin={**roles.origin, **origin})
