"""Defines roles: the function of a module in its block, in words that hold for every architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megasched.errors import Declined
from megasched.language.module_specs import AttentionSpec, LayerSpec, MlpSpec, MoeSpec

Cut = Literal["column", "row", "vocab", "features", "channels"]

# Every role, and how a module in it is cut over TP by the default schedule (None: whole on every rank).
ROLES: Mapping[str, Cut | None] = {
    "embed.tokens": "vocab",
    "embed.positions": None,
    "qkv.q": "column",
    "qkv.k": "column",
    "qkv.v": "column",
    "qkv.packed": "column",
    "attn.out": "row",
    # a table of biases with a column for each head
    "attn.bias": "features",
    "mlp.gate": "column",
    "mlp.up": "column",
    "mlp.gate_up": "column",
    "mlp.down": "row",
    "norm": None,
    "head": "column",
    # all experts of a layer; cut between experts over EP, if there is any
    "moe.experts": None,
    # leaves whose plan says how they are cut, but whose place in the block is not known by name
    "column": "column",
    "row": "row",
}


@dataclass(frozen=True)
class Roles:
    """Holds the facts about one definition that its modules alone do not show.

    Attributes:
        role: module path -> role.
        heads: module path -> heads in its output (projections to q, k, v), so that it is sharded between heads.
        components: module path -> sizes of the projections packed into its output, e.g. ``(q, k, v)``.
        local_attributes: module path -> attributes that count heads or features of one rank; divided by TP.
            ``config.num_attention_heads`` names a field of the module's config, which is copied first.
        origin: module path -> source of its role: an adapter's glob, an entry of HF's plan, an observation.
        declined: module path -> request or search that was declined, with the reason.
        layer: how Megatron's ``TransformerLayer`` can replace a decoder layer, or else why it can't.
        attention: how Megatron's ``SelfAttention`` can replace a layer's attention, or else why it can't.
        moe: how Megatron's ``MoELayer`` can replace a mixture of experts, or else why it can't.
        mlps: path of each module that looks like an MLP -> how Megatron's can replace it, or else why it can't.
    """

    role: Mapping[str, str] = field(default_factory=dict)
    heads: Mapping[str, int] = field(default_factory=dict)
    components: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    local_attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    origin: Mapping[str, str] = field(default_factory=dict)
    declined: Mapping[str, str] = field(default_factory=dict)
    layer: LayerSpec | Declined = field(default=Declined("nothing is known of its decoder layers"))
    attention: AttentionSpec | Declined = field(default=Declined("nothing is known of its attention"))
    moe: MoeSpec | Declined = field(default=Declined("nothing is known of its mixtures of experts"))
    mlps: Mapping[str, MlpSpec | Declined] = field(default_factory=dict)

    def moved(self, home: Callable[[str], str]) -> Roles:
        """Returns the same facts of modules that stand elsewhere now.

        Args:
            home: maps a path in the definition to where the module stands now.
        """

        def by_home[Fact](facts: Mapping[str, Fact]) -> dict[str, Fact]:
            return {home(path): fact for path, fact in facts.items()}

        return replace(
            self,
            role=by_home(self.role),
            heads=by_home(self.heads),
            components=by_home(self.components),
            local_attributes=by_home(self.local_attributes),
            origin=by_home(self.origin),
            declined=by_home(self.declined),
            mlps=by_home(self.mlps),
        )

    def __post_init__(self) -> None:
        for path, role in self.role.items():
            if role not in ROLES:
                raise ValueError(f"{path}: unknown role {role!r}; roles are {', '.join(ROLES)}")


def owner_of(module: Any, name: str) -> tuple[Any, str]:
    """Returns the object that holds a local attribute, and the attribute's name on it."""
    prefix, _, field_name = name.rpartition(".")
    return (getattr(module, "config", None) if prefix == "config" else module), field_name


def counts_by(module: Any, names: Iterable[str]) -> bool:
    """Returns whether a module holds one of these local attributes; layers of other kinds hold none."""
    return any(hasattr(*owner_of(module, name)) for name in names)
