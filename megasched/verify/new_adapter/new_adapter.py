"""Runs ``megasched new-adapter``: proposes the adapter that an architecture needs, and checks it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import nn

from megasched.analysis.find_layer_stack import find_layer_stack, layer_stack_of
from megasched.analysis.trials import attention_switch
from megasched.definition.build import build_definition, load_config
from megasched.definition.small_models.covering import Lack, covering_copy
from megasched.definition.small_models.small_models import copy_code, write_model
from megasched.errors import ConfigError, ScheduleError
from megasched.files import write_whole
from megasched.language.roles import ROLES, Roles
from megasched.layers import attention
from megasched.model_adapters.registry import adapter_origin
from megasched.verify.new_adapter.adapter_source import adapter_expression, write_source
from megasched.verify.new_adapter.globs import fold_paths
from megasched.verify.new_adapter.proposal import Proposal, found_roles, propose
from megasched.verify.parity import Outcome, check_layout
from megasched.verify.ranks.pool import RankPool

# Where a proposed adapter must be right before it is believed.
CHECKED = ("tp2", "tp2-sp", "pp2")


@dataclass
class NewAdapter:
    """Holds everything that ``megasched new-adapter`` reports.

    Attributes:
        model: class of the definition.
        proposal: the adapter, as data.
        source: the adapter's module, as text.
        lines: number of lines of ``ADAPTER = Adapter(...)`` in it.
        installed: the adapter that is there already, with its package; or empty.
        planned: number of linears that HF's own plan cuts.
        inferred: number of linears that are cut by an inferred role.
        whole: number of linears that were looked at and stay whole.
        still_open: what a person must look at, a sentence each.
        outcomes: layout -> what the check found; empty where none was made.
        layered: whether it has a list of layers, without which no trainer of Megatron's takes it.
    """

    model: str
    proposal: Proposal
    source: str
    lines: int
    installed: str
    planned: int
    inferred: int
    whole: int
    still_open: list[str]
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    layered: bool = True

    @property
    def right(self) -> bool:
        """Returns whether every check that was made found the same numbers on both sides."""
        return all(outcome.verdict == "equal" for outcome in self.outcomes.values())

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data for JSON."""
        return {**asdict(self), "right": self.right}


def new_adapter(
    hf_model: str,
    *,
    check: bool = True,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] = lambda layout: None,
) -> NewAdapter:
    """Inspects a definition and proposes an adapter for it.

    Args:
        hf_model: folder, config file or hub id; only the config is read.
        check: run the proposal on a small copy of the model.
        trust_remote_code: run Python code that comes with the model.
        progress: called with each layout before it is checked.

    Raises:
        ConfigError: there is no definition for the config, or no small copy of it can be made.
    """
    config = load_config(hf_model, trust_remote_code=trust_remote_code)
    small_config = None
    lacks: list[Lack] = []
    if check:
        small_config, _, lacks = covering_copy(config, trust_remote_code=trust_remote_code)
    model = _definition(config, trust_remote_code)
    roles = found_roles(model)
    proposal = propose(model, roles)
    source = write_source(proposal, transformers=version("transformers"))
    cut = [path for path, role in roles.role.items() if ROLES[role] in ("column", "row")]
    found = NewAdapter(
        type(model).__name__,
        proposal,
        source,
        len(adapter_expression(proposal).splitlines()),
        adapter_origin(config.model_type),
        sum(roles.origin[path].startswith("HF's plan") for path in cut),
        sum(roles.origin[path].startswith("inferred") for path in cut),
        len({*roles.declined, *proposal.left_out}),
        still_open(model, roles, proposal),
        layered=layer_stack_of(model) is not None,
    )
    if check:
        small = _definition(small_config, trust_remote_code)
        sizes = propose(small, found_roles(small)).packed
        checked = write_source(replace(proposal, packed=sizes), transformers=version("transformers"))
        found.still_open += [f"no layer of the copy that is checked is like {lack}" for lack in lacks]
        found.outcomes = check_source(checked, small_config, hf_model, trust_remote_code, progress)
    return found


def _definition(config: Any, trust_remote_code: bool) -> nn.Module:
    model = build_definition(config, trust_remote_code=trust_remote_code)
    attention.enable(model)
    return model


def check_source(
    source: str,
    small_config: Any,
    hf_model: str,
    trust_remote_code: bool,
    progress: Callable[[str], None],
) -> dict[str, Outcome]:
    """Compares a small model under the adapter with the unscheduled one, at each layout in ``CHECKED``."""
    outcomes = {}
    with tempfile.TemporaryDirectory() as folder, RankPool() as ranks:
        adapter = Path(folder) / "adapter.py"
        adapter.write_text(source)
        small = Path(folder) / "model"
        small.mkdir()
        copy_code(hf_model, small, trust_remote_code)
        write_model(small_config, small, trust_remote_code=trust_remote_code)
        for layout in CHECKED:
            progress(layout)
            outcomes[layout] = check_layout(
                ranks, str(small), layout, adapter=str(adapter), trust_remote_code=trust_remote_code
            )
    return outcomes


def still_open(model: nn.Module, roles: Roles, proposal: Proposal) -> list[str]:
    """Lists what is left to the author, a sentence each.

    It is about the sizes of packed projections, linears that stay whole, and unusual calls of the definition.
    """
    sizes = [
        f"packed gives {role} the sizes of this config, {parts}: write them as fields of the config"
        for role, parts in proposal.packed.items()
    ]
    whole = {**roles.declined, **proposal.left_out}
    folded = fold_paths(whole, [path for path, _ in model.named_modules()])
    return [*sizes, *(f"{glob} stays whole: {reason}" for glob, reason in folded.items()), *unusual_calls(model)]


def unusual_calls(model: nn.Module) -> list[str]:
    """Lists what a definition does differently from most, and what follows from it."""
    found = []
    if not attention_switch.is_used(model, attention_switch.attention_name(model)):
        found.append(
            "attention is computed by the definition's own code, not through transformers' AttentionInterface: "
            "a head count that is missing in local_attributes is not noticed there, and Transformer Engine's "
            "attention can't stand for it"
        )
    try:
        structure = find_layer_stack(model)
    except ScheduleError as error:
        return [*found, f"its layers were not found, so nothing was inferred: {error.problems[0].what}"]
    if structure.uncuttable:
        found.append(f"{structure.layers} can't be cut into pipeline stages: {structure.uncuttable}")
    if not structure.calls_loss:
        found.append("its forward does not call loss_function: the loss is computed from its logits")
    return found


def write_new(source: str, path: Path, *, force: bool = False) -> None:
    """Writes a file whole or not at all.

    Raises:
        ConfigError: the file exists and ``force`` is not given, or its folder does not, or it can't be written.
    """
    refuse_existing(path, force=force)
    try:
        write_whole(path, [source], replace=force)
    except FileExistsError:  # it has come meanwhile
        refuse_existing(path, force=False)
    except OSError as error:
        raise ConfigError(f"--output {path}: it can't be written: {error.strerror}") from error


def refuse_existing(path: Path, *, force: bool) -> None:
    """Raises ConfigError where ``write_new`` could not write.

    Raises:
        ConfigError: the file exists and ``force`` is not given, or its folder does not.
    """
    if os.path.lexists(path) and not force:
        raise ConfigError(f"--output {path}: the file exists; name another, or replace it with --force")
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path}: there is no folder {path.parent}")
