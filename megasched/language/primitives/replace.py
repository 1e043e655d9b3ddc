"""Primitives ``replace`` and ``replace_all``: other modules in the places of the definition's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megasched.errors import Problem, ScheduleError
from megasched.language.records import caller_source
from megasched.language.registry import Node, Primitive, record_subgraph, register_primitive
from megasched.language.subgraph import Subgraph

if TYPE_CHECKING:
    from torch import nn


@register_primitive
class Replace(Primitive):
    """Puts another module in this module's place and carries the weights over.

    Parameters:
        factory: the new module, or a function that takes the old module and returns the new one.
        weights: new parameter name -> old parameter name, or -> a function of the mapping of old tensors.
            Names that are equal on both sides need no entry, nor do parameters that the new module holds
            already because it wraps the old one. Every parameter of the new module must get a value, and every
            parameter and persistent buffer of the old one must be used.
        drop: old parameters and persistent buffers that the new module has no use for.
        subgraph: of a traced module, as ``find`` returns it: only these operations are replaced. It may stand
            second, in the place of ``weights``. The factory is a module without parameters, or gets the operations
            as a module and returns what to call instead; that takes ``subgraph.inputs`` in their order, the
            parameters among them as tensors.

    Persistent buffers of equal names are carried; hooks of both modules, ``requires_grad``, ties and annotations
    are kept. A module whose ``forward`` can't take the call that its parent makes is refused.

    Example: ``sch["model.norm"].replace(lambda old: torch.nn.RMSNorm(old.weight.shape[0], eps=1e-6))``
    """

    name = "replace"
    phase = "edit"
    replaces_modules = True
    survives_replacement = True
    takes_subgraph = True
    shown_by_effect = True
    instead = {  # noqa: RUF012
        "new_mod_or_func": "here it is called factory",
        "target_ops": "here it is called subgraph",
        "name": "leave it out: a module keeps the name of the one that it replaces",
        "concrete_args": "give a factory whose module or function has them already",
    }

    def record(
        self,
        node: Node,
        factory: nn.Module | Callable[[nn.Module], nn.Module],
        weights: Mapping[str, str | Callable[[dict[str, Any]], Any]] | Subgraph | Sequence[Subgraph] | None = None,
        drop: tuple[str, ...] = (),
        subgraph: Subgraph | Sequence[Subgraph] | Mapping[str, Any] | None = None,
    ) -> Mapping[str, Any]:
        if not isinstance(weights, Mapping | None):
            subgraph, weights = subgraph or weights, None
        if subgraph is not None:
            if weights or drop:
                what = "replace: a sub-graph has no weights of its own: it takes them as inputs"
                raise ScheduleError(Problem(what, node.path, caller_source(), "leave weights and drop out"))
            return {"factory": factory, "subgraph": record_subgraph(self, node, subgraph)}
        return {"factory": factory, "weights": dict(weights or {}), "drop": tuple(drop)}


@register_primitive
class ReplaceAll(Primitive):
    """Replaces every module below this one that matches, as ``replace`` does one.

    Parameters:
        what: a module class (exactly this class), a role of the adapter (``norm.input``), or a regular
            expression that must match the whole path below this module.
        factory: function that takes the old module, or its path below this one and the old module, and returns the
            new one.
        weights, drop: as in ``replace``.

    Replacements are not searched again. No match is an error.
    """

    name = "replace_all"
    phase = "edit"
    replaces_modules = True
    of_definition = True
    survives_replacement = True
    shown_by_effect = True
    instead = {  # noqa: RUF012
        "target_mod_type": "here it is called what",
        "make_mod_fn": "here it is called factory",
    }

    def record(
        self,
        node: Node,
        what: type[nn.Module] | str,
        factory: Callable[[nn.Module], nn.Module] | Callable[[str, nn.Module], nn.Module],
        weights: Mapping[str, str | Callable[[dict[str, Any]], Any]] | None = None,
        drop: tuple[str, ...] = (),
    ) -> Mapping[str, Any]:
        if isinstance(what, str):
            try:
                re.compile(what)
            except re.error as error:
                problem = f"replace_all: {what!r} is no regular expression: {error}"
                raise ScheduleError(Problem(problem, node.path, caller_source())) from error
        return {"what": what, "factory": factory, "weights": dict(weights or {}), "drop": tuple(drop)}

    def check(self, node: Node, arguments: Mapping[str, Any], source: str) -> list[Problem]:
        if self.paths(node, arguments):
            return []
        remedy = "a class, a role or a regular expression over the whole path below this module"
        return [Problem(f"replace_all: nothing matches {arguments['what']!r}", node.path, source, remedy)]

    def paths(self, node: Node, arguments: Mapping[str, Any]) -> list[str]:
        """Full paths of the outermost modules below ``node`` that match."""
        what, found = arguments["what"], dict[str, str]()
        for name, child in node.below().items():
            if any(name.startswith(outer + ".") for outer in found):
                continue
            if isinstance(what, str):
                hit = node.role_of(child.path) == what or re.fullmatch(what, name) is not None
            else:
                hit = type(child.mod) is what
            if hit:
                found[name] = child.path
        return list(found.values())
