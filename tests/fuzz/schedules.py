"""Schedules at random, at a random layout: a step is that of plain HF, or is refused, by the plan already.

python -m tests.fuzz.schedules SECONDS [SEED [TYPE ...]]
"""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from megasched.definition.linears import is_linear, may_be_replaced
from megasched.definition.small_models.small_models import write_small_model
from megasched.language.parallel_dims import ParallelDims
from megasched.language.primitives.hook import MODES
from megasched.language.primitives.level import LEVELS
from megasched.trainer.session import open_session
from megasched.verify import parity
from megasched.verify.parity import LAYOUTS, Outcome, check_layout
from megasched.verify.ranks.pool import RankPool
from tests.fuzz.flags import TYPES
from tests.fuzz.run_configs import hunt

# What a drawn schedule may call; none of it changes what is computed.
HELPERS = """
import copy
import zlib

import megasched
from megasched.model_adapters.default_schedule import schedule as default
from tests.language.replacing import Around


@megasched.register_compiler(__name__)
def as_it_is(part):
    return part.graph


def edit(node, salt, *primitives):
    node.trace()
    found = node.find(lambda node: zlib.crc32(f"{salt} {node.name}".encode()) % 3 == 0, missing_ok=True)
    if salt % 3 == 0 and len(found) > 1:
        found = [found[0] | found[1], *found[2:]]
    for primitive, one in zip(primitives, found):
        if primitive == "fuse":
            node.fuse(one, compiler=__name__)
        elif primitive == "replace":
            node.replace(lambda old: old, subgraph=one)
        else:
            node.checkpoint(one)


def schedule(sch, layout):
"""
NAMES = tuple(name for name in LAYOUTS if name != "one")


def write_schedule(folder: str, seed: str, file: str, layout: str) -> list[str]:
    """Writes a schedule of one to six lines for the model in a folder; in a rank.

    Returns:
        Its lines.
    """
    draw = random.Random(seed)
    session = open_session("auto", folder, ParallelDims(tensor_model_parallel_size=2))
    records = [record for record in session.schedule.records if record.primitive == "shard"]
    model = session.definition
    lines = []
    match "auto" if "ep2" in layout else draw.choice(("auto", "some of it", "some of it", "none of it")):
        case "auto":
            lines.append("default(sch, layout)")
        case "some of it":
            calls = {_of_all_layers(record.path): record.arguments for record in records}
            outside = [path for path in calls if "*" not in path]  # tied, perhaps
            inside = [path for path in calls if "*" in path]
            kept = draw.choice(([], outside)) + draw.sample(inside, draw.randint(len(inside) // 2, len(inside)))
            lines += [_call(path, "shard", **calls[path]) for path in calls if path in kept]
        case _:
            lines += [_shard(model, draw) for _ in range(draw.choice((1, 1, 2)))]
    if "pp2" in layout and draw.random() < 0.5:
        lines += _cuts(session.structure, 3 if "vpp2" in layout else 1, draw)
    for _ in range(draw.choice((0, 1, 2, 3))):
        lines.append(draw.choice(DRAWS)(model, draw))
    Path(file).write_text(HELPERS + "".join(f"    {line}\n" for line in lines))
    return lines


def _call(path: str, primitive: str, *arguments: Any, **named: Any) -> str:
    told = [*map(repr, arguments), *(f"{name}={value!r}" for name, value in named.items())]
    return f"sch[{path!r}].{primitive}({', '.join(told)})"


def _of_all_layers(path: str) -> str:
    """Returns a pattern of the same module in all layers: a number in the path becomes a star."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", path, count=1)


def _module(
    model: nn.Module, draw: random.Random, wanted: Callable[[nn.Module], Any] = lambda module: True
) -> tuple[str, nn.Module]:
    path, module = draw.choice([(path, one) for path, one in model.named_modules() if path and wanted(one)])
    return _of_all_layers(path) if draw.random() < 0.7 else path, module


def _path(model: nn.Module, draw: random.Random) -> str:
    return _module(model, draw)[0]


def _parameters(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters(recurse=False)]


def _shard(model: nn.Module, draw: random.Random) -> str:
    wanted = may_be_replaced if draw.random() < 0.9 else _parameters
    path, module = _module(model, draw, wanted)
    name = draw.choice(_parameters(module))
    return _call(path, "shard", name, axis=draw.randrange(module.get_parameter(name).dim()))


def _cuts(structure: Any, most: int, draw: random.Random) -> list[str]:
    last = draw.sample(range(structure.count - 1), min(most, structure.count - 1))
    return [_call(structure.layer_path(index), "cut_pipeline_stage") for index in sorted(last)]


def _on_any(primitive: str) -> Callable[[nn.Module, random.Random], str]:
    return lambda model, draw: _call(_path(model, draw), primitive)


def _level(model: nn.Module, draw: random.Random) -> str:
    return _call(_path(model, draw), "level", draw.choice(LEVELS), required=False)


def _block(model: nn.Module, draw: random.Random) -> str:
    layers = _module(model, draw, lambda module: isinstance(module, GradientCheckpointingLayer))[0]
    return _call(layers, "level", "block", required=False)


def _annotate(model: nn.Module, draw: random.Random) -> str:
    path, module = _module(model, draw, _parameters)
    return _call(path, "annotate", draw.choice(_parameters(module)), "x", 1)


def _copied(model: nn.Module, draw: random.Random) -> str:
    return f"sch[{_path(model, draw)!r}].replace(copy.deepcopy)"


def _wrapped(model: nn.Module, draw: random.Random) -> str:
    return f"sch[{_path(model, draw)!r}].replace(Around)"


def _brought_in(model: nn.Module, draw: random.Random) -> str:
    """Wraps a module, and calls something on it, or on one inside of it, where it stands then."""
    path, module = _module(model, draw)
    name, inside = draw.choice([*module.named_modules()])
    inner = f"{path}.inner.{name}".rstrip(".")
    own = _parameters(inside)
    calls = [f"sch[{inner!r}].replace(Around)", _call(inner, "checkpoint"), _call(inner, "fork_rng")]
    if own:
        param = draw.choice(own)
        shards = _call(inner, "shard", param, axis=draw.randrange(inside.get_parameter(param).dim()))
        calls += [shards, shards, _call(inner, "annotate", param, "x", 1)]
    return f"sch[{path!r}].replace(Around); {draw.choice(calls)}"


def _hook(model: nn.Module, draw: random.Random) -> str:
    return f"sch[{_path(model, draw)!r}].hook({draw.choice(list(MODES))!r}, lambda *call: None)"


def _edited(model: nn.Module, draw: random.Random) -> str:
    primitives = draw.sample(("fuse", "replace", "checkpoint"), draw.choice((1, 2, 3)))
    leaves = draw.random() < 0.1
    path = draw.choice([path for path, one in model.named_modules() if path and (leaves or any(one.children()))])
    return f"edit(sch[{path!r}], {draw.randrange(100)}, {', '.join(map(repr, primitives))})"


def _decomposed(model: nn.Module, draw: random.Random) -> str:
    """Decomposes linears, and edits a graph of a module around them."""
    paths = [path for path, one in model.named_modules() if "." in path and is_linear(one)]
    around = draw.choice([path.rpartition(".")[0] for path in paths])
    inside = [path for path in paths if path.startswith(f"{around}.")]
    calls = [_call(path, "decompose") for path in draw.sample(inside, draw.randint(1, len(inside)))]
    edits = draw.choice(("'fuse'", "'fuse', 'checkpoint'", "'replace'"))
    return "; ".join([*calls, f"edit(sch[{around!r}], {draw.randrange(100)}, {edits})"])


DRAWS: tuple[Callable[[nn.Module, random.Random], str], ...] = (
    *(_on_any("checkpoint"), _on_any("checkpoint"), _on_any("fork_rng"), _on_any("probe"), _on_any("trace")),
    *(
        _level,
        _block,
        _annotate,
        _copied,
        _wrapped,
        _wrapped,
        _brought_in,
        _brought_in,
        _hook,
        _edited,
        _edited,
        _decomposed,
    ),
)


@contextmanager
def refusals_of_runs_told() -> Iterator[None]:
    """Runs its body with the verdict ``late`` for refusals that only a run makes, after the plan."""
    real = parity.failure

    def failure(report: str) -> Outcome:
        outcome = real(report)
        of_plan = "session_from_args" in report.split("\n    its output:")[0]
        return outcome if of_plan or outcome.verdict != "refused" else replace(outcome, verdict="late")

    parity.failure = failure
    try:
        yield
    finally:
        parity.failure = real


def outcomes(ranks: RankPool, types: Sequence[str], seed: int) -> Iterator[tuple[str, Outcome]]:
    """What is tried of the types in turn, and what comes of it."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as work:
        folders = {name: ranks.run(1, write_small_model, name, f"{work}/{name}", timeout=240)[0] for name in types}
        for number in count():
            model_type, layout = types[number % len(types)], draw.choice(NAMES)
            file, drawn = f"{work}/drawn_{number}.py", f"{seed} {number}"
            (lines,) = ranks.run(1, write_schedule, folders[model_type], drawn, file, layout, timeout=240)
            with refusals_of_runs_told():
                outcome = check_layout(ranks, folders[model_type], layout, schedule=file)
            if outcome.verdict != "not applicable":
                yield f"{model_type} at {layout}: {'; '.join(lines)}", outcome


if __name__ == "__main__":
    from tests.fuzz import schedules  # by whose name the ranks find its functions

    hunt(TYPES, schedules.outcomes)
