"""Registers adapters, which hold facts about HF architectures, and finds them by the config's model type.

An adapter is data first: globs over module paths give roles, and other facts about a role follow from the HF
config. Megasched's own are in ``families``, one family per file. Third parties register theirs through the
entry point group ``megasched.model_adapters`` (a module-level ``Adapter``, or a list of them).
"""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points, version
from pkgutil import iter_modules
from typing import Any

from torch import nn

from megasched.definition.build import text_config
from megasched.definition.embeddings import looks_up
from megasched.definition.experts import find_experts, not_apart
from megasched.definition.linears import is_linear
from megasched.errors import ConfigError, Declined
from megasched.language.module_specs import AttentionSpec, LayerSpec, MlpSpec, MoeSpec
from megasched.language.roles import ROLES, Cut, Roles, counts_by
from megasched.model_adapters import families
from megasched.model_adapters.adapter_file import FLAG, run_adapter
from megasched.model_adapters.generic import head_counts, read_plan
from megasched.model_adapters.reading.attention import AttentionFacts, read_attention
from megasched.model_adapters.reading.layer import LayerFacts, read_layer
from megasched.model_adapters.reading.mlp import read_mlps
from megasched.model_adapters.reading.moe import MoeFacts, read_moe

GROUP = "megasched.model_adapters"


@dataclass(frozen=True)
class Adapter:
    """Holds the facts about one family of architectures.

    For Megatron's own modules (level ``block``), it holds facts that the definitions do not show, or a function of
    the definition that returns the spec, or the reason why there is none. Missing ones are taken from megasched's
    own adapter for the model type, if there is one.

    Attributes:
        model_types: values of ``config.model_type``, e.g. ``("gpt2",)``.
        roles: glob over module paths -> role, e.g. ``{"*.mlp.c_proj": "mlp.down"}``; None: HF's own plan gives
            them, and missing ones are inferred.
        packed: role -> function of the HF config that returns the sizes of the projections packed into it.
        local_attributes: glob over module paths -> attributes that count this rank's heads or features. It is
            about the modules that have one of them: a layer of another kind may stand there as well.
        layer: of its decoder layers, for Megatron's ``TransformerLayer``.
        attention: of its attention, and the norms of its layers, for Megatron's ``SelfAttention``.
        moe: of its mixtures of experts, for Megatron's ``MoELayer``.
        mlps: function that returns for each module that looks like an MLP its spec, or why Megatron's can't
            replace it; by default it tries them with numbers.
        block, mixture: names of ``layer`` and ``moe`` in earlier releases.
    """

    model_types: tuple[str, ...]
    roles: Mapping[str, str] | None = None
    packed: Mapping[str, Callable[[Any], tuple[int, ...]]] = field(default_factory=dict)
    local_attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    layer: LayerFacts | Callable[[nn.Module], LayerSpec | Declined | str] | None = None
    attention: AttentionFacts | Callable[[nn.Module], AttentionSpec | Declined | str] | None = None
    moe: MoeFacts | Callable[[nn.Module], MoeSpec | Declined | str] | None = None
    mlps: Callable[[nn.Module], Mapping[str, MlpSpec | Declined | str]] = read_mlps
    block: InitVar[Callable[[nn.Module], LayerSpec | Declined | str] | None] = None
    mixture: InitVar[Callable[[nn.Module], MoeSpec | Declined | str] | None] = None

    def __post_init__(self, block: Any, mixture: Any) -> None:
        if self.roles is None and (self.packed or self.local_attributes):
            raise ValueError(f"the adapter for {self.model_types}: packed and local_attributes go with roles")
        for new, old, given in (("layer", "block", block), ("moe", "mixture", mixture)):
            if given is not None:
                warnings.warn(f"Adapter({old}=...) is called Adapter({new}=...)", DeprecationWarning, stacklevel=3)
                object.__setattr__(self, new, given)

    def bind(self, model: nn.Module) -> Roles:
        """Returns the roles and specs of one definition.

        Raises:
            ConfigError: a glob of the adapter matches no module, so the definition must have changed; or
                HF's plan has an unknown style.
        """
        attention = self._attention(model)
        return replace(
            read_plan(model) if self.roles is None else self._read_globs(model, self.roles),
            layer=self._layer(model, attention),
            attention=attention,
            moe=self._moe(model),
            mlps={path: _or_declined(mlp) for path, mlp in self.mlps(model).items()},
        )

    def _read_globs(self, model: nn.Module, roles: Mapping[str, str]) -> Roles:
        config: Any = model.config
        paths = [path for path, _ in model.named_modules()]
        role, origin = {}, {}
        for glob, name in roles.items():
            for path in self._matching(glob, paths, config):
                role[path], origin[path] = name, f"adapter: {glob} is {name}"
        components = {path: self.packed[name](config) for path, name in role.items() if name in self.packed}
        local = {
            path: names
            for glob, names in self.local_attributes.items()
            for path in _that_count(model, self._matching(glob, paths, config), names)
        }
        return Roles(role, head_counts(role, config), components, local, origin)

    def _matching(self, glob: str, paths: list[str], config: Any) -> list[str]:
        found = [path for path in paths if fnmatch.fnmatchcase(path, glob)]
        if not found:
            raise ConfigError(
                f"the adapter for {config.model_type!r} expects modules {glob!r}, and the definition has none; "
                "this version of transformers is not the one that the adapter was written for"
            )
        return found

    def _attention(self, model: nn.Module) -> AttentionSpec | Declined:
        facts = self._facts("attention", "attention", model.config)
        return read_attention(model, facts) if isinstance(facts, AttentionFacts) else _spec(facts, model)

    def _layer(self, model: nn.Module, attention: AttentionSpec | Declined) -> LayerSpec | Declined:
        facts = self._facts("layer", "block", model.config)
        return read_layer(model, facts, attention) if isinstance(facts, LayerFacts) else _spec(facts, model)

    def _moe(self, model: nn.Module) -> MoeSpec | Declined:
        facts = self._facts("moe", "mixture", text_config(model.config))
        return read_moe(model, facts) if isinstance(facts, MoeFacts) else _spec(facts, model)

    def _facts(self, name: str, what: str, config: Any) -> Any:
        """Returns the adapter's own facts, or those of megasched's for the model type, or why there are none."""
        own = getattr(self, name)
        found = own if own is not None else getattr(own_adapters().get(config.model_type), name, None)
        return Declined(f"no {what} is known for model type {config.model_type!r}") if found is None else found


def _spec(facts: Any, model: nn.Module) -> Any:
    return facts if isinstance(facts, Declined) else _or_declined(facts(model))


def _that_count(model: nn.Module, paths: Sequence[str], names: Sequence[str]) -> Sequence[str]:
    """Returns the paths whose modules count by the names; all where none does, so that this is told."""
    return [path for path in paths if counts_by(model.get_submodule(path), names)] or paths


def _or_declined(found: Any) -> Any:
    """Returns what an adapter's own function gave, which may say its reason as a plain string."""
    return Declined(found) if isinstance(found, str) else found


@cache
def _families() -> dict[str, tuple[Adapter, str]]:
    """Returns megasched's own adapters with their origins, by model type."""
    found = {}
    for file in iter_modules(families.__path__):
        name = f"{families.__name__}.{file.name}"
        adapters = import_module(name).ADAPTER
        origin = f"{file.name} = {name}:ADAPTER of megasched {version('megasched')}"
        for adapter in [adapters] if isinstance(adapters, Adapter) else adapters:
            found |= dict.fromkeys(adapter.model_types, (adapter, origin))
    return found


def own_adapters() -> dict[str, Adapter]:
    """Returns megasched's own adapters by model type; ``ADAPTER`` of a family's file may be a list of them."""
    return {model_type: adapter for model_type, (adapter, _) in _families().items()}


@cache
def _installed() -> dict[str, tuple[Adapter, str]]:
    """Returns adapters with roles, and all of other packages, with their origins, by model type."""
    found = {model_type: own for model_type, own in _families().items() if own[0].roles is not None}
    for point in entry_points(group=GROUP):
        if point.dist is not None and point.dist.name == "megasched":
            continue  # of an older commit's installation: its own are found by their folder
        for adapter in _load(point):
            for model_type in adapter.model_types:
                if model_type in found:
                    raise ConfigError(
                        f"two adapters for model type {model_type!r}: {found[model_type][1]} and "
                        f"{_origin(point)}; uninstall one of the two packages, or take the model type out of one"
                    )
                found[model_type] = (adapter, _origin(point))
    return found


def _load(point: EntryPoint) -> Sequence[Adapter]:
    """Loads the adapters that an entry point names.

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
    adapters = _listed(loaded)
    if adapters is None:
        raise ConfigError(
            f"the adapter {_origin(point)} is a {type(loaded).__name__}; an entry point of the group {GROUP} "
            "names an Adapter, or a list of them"
        )
    return adapters


def _listed(loaded: Any) -> Sequence[Adapter] | None:
    """Returns the adapters that an ``ADAPTER`` stands for, one or several; None where it is something else."""
    adapters = [loaded] if isinstance(loaded, Adapter) else loaded
    sound = isinstance(adapters, list | tuple) and all(isinstance(adapter, Adapter) for adapter in adapters)
    return adapters if sound else None


def _origin(point: EntryPoint) -> str:
    """Returns the entry point and its package, as errors name them."""
    package = "a package without metadata" if point.dist is None else f"{point.dist.name} {point.dist.version}"
    return f"{point.name} = {point.value} of {package}"


def load_adapter(file: str, model_type: str) -> Adapter:
    """Loads the adapter for a model type from a Python file that no package registers.

    Raises:
        ConfigError: the file can't be run, or has no ``ADAPTER`` for this model type.
    """
    adapters = _listed(run_adapter(file).get("ADAPTER"))
    if adapters is None:
        raise ConfigError(f"{FLAG} {file}: it has no ADAPTER = Adapter(...) at module level")
    for adapter in adapters:
        if model_type in adapter.model_types:
            return adapter
    types = ", ".join(name for adapter in adapters for name in adapter.model_types)
    raise ConfigError(f"{FLAG} {file}: it is for model type {types}, and this model is of {model_type!r}")


def find_adapter(model_type: str) -> Adapter | None:
    """Returns the adapter for this model type, or None if there is none.

    Raises:
        ConfigError: a package's adapter can't be imported, or two are for one model type.
    """
    found = _installed().get(model_type)
    return found[0] if found else own_adapters().get(model_type)


def has_roles(model_type: str, adapter: Adapter | None = None) -> bool:
    """Returns whether an adapter gives the roles of this model type; else HF's plan and inference do.

    Args:
        adapter: one that stands before any installed one.
    """
    adapter = adapter or find_adapter(model_type)
    return adapter is not None and adapter.roles is not None


def adapter_origin(model_type: str) -> str:
    """Returns the origin of an installed adapter for this model type; empty if there is none.

    Example: ``mine = module:NAME of package 1.0``.
    """
    found = _installed().get(model_type)
    return found[1] if found else ""


def roles_of(model: nn.Module, adapter: Adapter | None = None) -> Roles:
    """Returns the roles of a definition, from an adapter with roles or else from HF's plan (see ``generic.py``).

    Args:
        adapter: one that stands before any installed one.

    Raises:
        ConfigError: the adapter does not fit the definition, or HF's plan has an unknown style.
    """
    model_type = getattr(model.config, "model_type", "")
    adapter = adapter or find_adapter(model_type) or Adapter((model_type,))
    roles = _that_can_be_cut(model, adapter.bind(model))
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
    """Returns the roles without those of modules that can't be sharded because they compute something else.

    Such modules stay whole, and so do modules that are tied to one.
    """
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
