"""What megasched must know of an HF architecture that it can't read off it; found by the config's model type.

An adapter is data first: globs over module paths give roles, and what a role needs beyond that follows from
the HF config. Third parties register theirs through the entry point group ``megasched.model_adapters``
(a module-level ``Adapter``, or a list of them).
"""

from __future__ import annotations

import fnmatch
import runpy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasched.definition.build import text_config
from megasched.definition.embeddings import looks_up
from megasched.definition.experts import find_experts, not_apart
from megasched.definition.linears import is_linear
from megasched.errors import ConfigError
from megasched.language.module_specs import AttentionSpec, LayerSpec, MlpSpec, MoeSpec
from megasched.language.roles import ROLES, Cut, Roles
from megasched.model_adapters.reading.attention import attention_of
from megasched.model_adapters.reading.layer import block_of
from megasched.model_adapters.reading.mlp import mlps_of
from megasched.model_adapters.reading.moe import mixture_of

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
        attention: the same of Megatron's ``SelfAttention`` and that of its layers; ``attentions.py`` by default.
        mixture: the same of its ``MoELayer`` and its mixtures of experts; ``mixtures.py`` by default.
        mlps: the same of its ``MLP`` and each module that looks like one; ``mlps.py`` by default.
    """

    model_types: tuple[str, ...]
    roles: Mapping[str, str]
    packed: Mapping[str, Callable[[Any], tuple[int, ...]]] = field(default_factory=dict)
    local_attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    block: Callable[[nn.Module], LayerSpec | str] = block_of
    attention: Callable[[nn.Module], AttentionSpec | str] = attention_of
    mixture: Callable[[nn.Module], MoeSpec | str] = mixture_of
    mlps: Callable[[nn.Module], Mapping[str, MlpSpec | str]] = mlps_of

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
        return Roles(
            role,
            heads,
            components,
            local,
            origin,
            layer=self.block(model),
            attention=self.attention(model),
            moe=self.mixture(model),
            mlps=self.mlps(model),
        )

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
    config = text_config(config)
    queries = getattr(config, "num_attention_heads", None)
    keys = getattr(config, "num_key_value_heads", None) or queries
    counts = {"qkv.q": queries, "attn.out": queries, "qkv.k": keys, "qkv.v": keys, "qkv.packed": keys}
    return {path: counts[name] for path, name in role.items() if counts.get(name)}


@cache
def _adapters() -> dict[str, tuple[Adapter, EntryPoint]]:
    found: dict[str, tuple[Adapter, EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        for adapter in _load(point):
            for model_type in adapter.model_types:
                if model_type in found:
                    raise ConfigError(
                        f"two adapters for model type {model_type!r}: {_origin(found[model_type][1])} and "
                        f"{_origin(point)}; uninstall one of the two packages, or take the model type out of one"
                    )
                found[model_type] = (adapter, point)
    return found


def _load(point: EntryPoint) -> list[Adapter]:
    """The adapters that an entry point names.

    Raises:
        ConfigError: it can't be imported, or is no adapter; the message names the package.
    """
    try:
        loaded = point.load()
    except Exception as error:  # whatever another package's module raises
        raise ConfigError(
            f"the adapter {_origin(point)} can't be imported: {type(error).__name__}: {error}; "
            "repair or uninstall that package"
        ) from error
    adapters = [loaded] if isinstance(loaded, Adapter) else loaded
    if not (isinstance(adapters, list | tuple) and all(isinstance(adapter, Adapter) for adapter in adapters)):
        raise ConfigError(
            f"the adapter {_origin(point)} is a {type(loaded).__name__}; an entry point of the group {GROUP} "
            "names an Adapter, or a list of them"
        )
    return list(adapters)


def _origin(point: EntryPoint) -> str:
    """An entry point and its package, as errors name it."""
    package = "a package without metadata" if point.dist is None else f"{point.dist.name} {point.dist.version}"
    return f"{point.name} = {point.value} of {package}"


def load_adapter(file: str | Path) -> Adapter:
    """``ADAPTER`` of a Python file that no package registers.

    Raises:
        ConfigError: the file can't be run, or has none.
    """
    try:
        found = runpy.run_path(str(file)).get("ADAPTER")
    except Exception as error:  # whatever the file's code raises
        raise ConfigError(f"{file} can't be run: {type(error).__name__}: {error}") from error
    if not isinstance(found, Adapter):
        raise ConfigError(f"{file} has no ADAPTER = Adapter(...) at module level")
    return found


# Adapters that stand before the installed ones, the last first.
_USED: list[Adapter] = []


@contextmanager
def using(adapter: Adapter) -> Iterator[None]:
    """Has an adapter found for its model types, whatever is installed, while the block lasts."""
    _USED.append(adapter)
    try:
        yield
    finally:
        _USED.pop()


def find_adapter(model_type: str) -> Adapter | None:
    """The adapter for this model type; None if there is none and the generic one serves.

    Raises:
        ConfigError: a package's adapter can't be imported, or two are for one model type.
    """
    for adapter in reversed(_USED):
        if model_type in adapter.model_types:
            return adapter
    found = _adapters().get(model_type)
    return found[0] if found else None


def adapter_origin(model_type: str) -> str:
    """Which package has the adapter for this model type: ``gpt2 = module:NAME of megasched 0.1.0``; or empty."""
    found = _adapters().get(model_type)
    return _origin(found[1]) if found else ""


def roles_of(model: nn.Module) -> Roles:
    """What is known of a definition: by its own adapter, or else by HF's plan (see ``generic.py``).

    Raises:
        ConfigError: the adapter does not fit the definition, or HF's plan has a style that is not known.
    """
    from megasched.model_adapters.generic import read_plan

    adapter = find_adapter(getattr(model.config, "model_type", ""))
    if adapter is not None:
        roles = adapter.bind(model)
    else:
        roles = replace(
            read_plan(model),
            layer=block_of(model),
            attention=attention_of(model),
            moe=mixture_of(model),
            mlps=mlps_of(model),
        )
    roles = _that_can_be_cut(model, roles)
    experts = dict.fromkeys(find_experts(model), "moe.experts")
    origin = dict.fromkeys(experts, "has the form of HF's experts")
    whole = {path: f"has the form of HF's experts, but {why}" for path, why in not_apart(model).items()}
    return replace(
        roles,
        role={**roles.role, **experts},
        origin={**roles.origin, **origin},
        declined={**roles.declined, **whole},
    )


def _that_can_be_cut(model: nn.Module, roles: Roles) -> Roles:
    """Without the roles by which modules would be cut that compute something else; they stay whole, and so does
    what is tied to one."""
    cut = {path: model.get_submodule(path) for path, name in roles.role.items() if ROLES[name] is not None}
    reasons = {path: why for path, module in cut.items() if (why := _why_whole(module, ROLES[roles.role[path]]))}
    whole = {id(parameter): path for path in reasons for parameter in cut[path].parameters(recurse=False)}
    for path, module in cut.items():
        tied = [whole[id(held)] for held in module.parameters(recurse=False) if id(held) in whole]
        if path not in reasons and tied:
            reasons[path] = f"tied to {tied[0]}, which stays whole"
    if not reasons:
        return roles
    told = {path: f"{roles.origin[path]}, but {why}" for path, why in reasons.items()}
    kept = {path: name for path, name in roles.role.items() if path not in told}
    heads = {path: count for path, count in roles.heads.items() if path not in told}
    return replace(roles, role=kept, heads=heads, declined={**roles.declined, **told})


def _why_whole(module: nn.Module, cut: Cut | None) -> str:
    name = type(module).__name__
    if cut in ("column", "row") and not is_linear(module):
        return f"this {name} computes or holds more than nn.Linear does"
    if cut in ("vocab", "features") and not looks_up(module):
        return f"this {name} does more with its table than nn.Embedding's lookup"
    return ""
