"""Finds attributes in which a module counts heads or features, by trial.

With a rank's part of the columns' outputs, the module's operations must give what the labelled run expects on a
rank.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

from torch import nn

from megasched.analysis.recording.tape import Tape
from megasched.analysis.stages.layer_stack import LayerStack
from megasched.analysis.tp.facts import TpAssumptions
from megasched.analysis.tp.module_call import ModuleCall
from megasched.analysis.tp.module_calls import RecordedCalls
from megasched.analysis.tp.replay import PLACES, Rank, divided, local_linears, replay

# So many attributes at most must be divided together.
_AT_MOST = 3


def find_counts(
    tape: Tape, structure: LayerStack, assume: TpAssumptions, tp: int, inferred: set[str]
) -> tuple[dict[str, tuple[str, ...]], set[str]]:
    """Returns the attributes to divide by TP, by module, and the columns for which no attributes help.

    Args:
        tape: tape of the definition.
        assume: what is cut; nothing of it needs to be gathered.
        tp: tensor parallel size.
        inferred: columns and rows to look at; other linears already have roles and counts.
    """
    rank = Rank(tp, assume.cuts, assume.components, assume.heads)
    run = RecordedCalls(tape, assume, loss_takes_shards=True)
    run.read()
    found: dict[str, tuple[str, ...]] = {}
    hopeless: set[str] = set()
    seen: dict[Any, tuple[str, ...] | None] = {}
    for path, call in run.tp_facts.calls.items():
        module = tape.model.get_submodule(path)
        if path in assume.cuts or not call.columns & inferred or not structure.is_below_layer(path):
            continue
        kind = (type(module), tuple(sorted(_candidates(module).items())), call.results, call.numbers)
        if kind not in seen:
            seen[kind] = _attributes(module, path, call, rank)
        names = seen[kind]
        if names is None:
            hopeless |= call.columns
        elif names:
            found[path] = names
    return found, hopeless


def _candidates(module: nn.Module) -> dict[str, int]:
    """Returns the attributes that may count heads or features: integers of a module, and of its config."""
    numbers = {name: value for name, value in vars(module).items() if type(value) is int and value > 1}
    own = {name: value for name, value in numbers.items() if name not in PLACES}
    config = vars(module).get("config")
    fields = vars(config) if config is not None else {}
    counted = ("num_attention_heads", "num_key_value_heads", "n_head", "num_heads", "hidden_size")
    return {**own, **{f"config.{name}": fields[name] for name in counted if type(fields.get(name)) is int}}


def _attributes(module: nn.Module, path: str, call: ModuleCall, rank: Rank) -> tuple[str, ...] | None:
    """Returns the fewest attributes that, divided by TP, make a module compute a rank's part; None without any."""
    counts = {name: rank.count(path, value) for name, value in _candidates(module).items()}
    local = {name: count for name, count in counts.items() if count is not None}
    for number in range(_AT_MOST + 1):
        for chosen in combinations(local, number):
            with divided(module, {name: local[name] for name in chosen}), local_linears(module, path, rank):
                if replay(module, path, call, rank.tp, rank.cuts) is not None:
                    return chosen
    return None
