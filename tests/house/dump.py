"""All that is decided about the small model of every type at every layout, in words that no rebuilding changes.

    python -m tests.house.dump OUT.json.xz [--types llama gpt2] [--layouts tp2 cp2]
    python -m tests.house.dump --compare BEFORE.json.xz AFTER.json.xz

The first command plans each model as a run would and writes what came of it: placements, cuts, what follows from
them, regions with their arguments, what crosses each boundary between stages, what is Megatron's own and why the
rest is not, FLOPs, what ``explain`` and ``show --json`` print, and refusals in their words. The second one says
what differs. Sets are sorted, and objects are told by the paths of their modules: dumps of one commit are equal.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megasched.errors import MegaschedError
from megasched.language.parallel_dims import ParallelDims

LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2-sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "pp2-vpp2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "ep2": {"expert_model_parallel_size": 2, "data_parallel_size": 2},
    "tp2-pp2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "cp2-tp2": {"context_parallel_size": 2, "tensor_model_parallel_size": 2},
}
# Where a call stands in a schedule is no decision, and says where the checkout is.
_AT = re.compile(r"\\n    asked for at: [^\\]*")
_LENGTH = 16  # of the sequences for which stages are cut and FLOPs counted


def dump_of(folder: str, layout: ParallelDims) -> dict[str, Any]:
    """What is decided about one model at one layout; the refusal alone where it is refused."""
    from megasched.trainer.session import open_session

    try:
        session = open_session("auto", folder, layout)
        return {
            **_of_plan(session.plan),
            "stages": _stages(session),
            "flops": _flops(session),
            **_printed(folder, layout),
        }
    except MegaschedError as error:
        return {"refused": str(error).replace(folder, "MODEL")}
    except Exception as error:  # of whatever kind: a fault, which is a fact of that commit, too
        return {"fails": f"{type(error).__name__}: {error}".replace(folder, "MODEL")}


def _of_plan(plan: Any) -> dict[str, Any]:
    heads = {path: [each.heads, each.components] for path, each in plan.replicated_heads.items()}
    return {
        "placements": {name: _placement(plan, one) for name, one in plan.placements.items()},
        "ties": {name: to for name, to in plan.canonical.items() if name != to},
        "cuts": plan.cuts,
        "experts over EP": sorted(plan.experts),
        "kv heads on several ranks": heads,
        "left whole": plan.left_whole,
        "tp": _tp_facts(plan.tp_facts),
        "cp": None if plan.cp_facts is None else _cp_facts(plan.cp_facts),
        "packed sequences": None if plan.packed is None else _packed_facts(plan.packed),
        "layers": None if plan.structure is None else _layers(plan.structure),
        "megatron": {
            "layers": sorted(plan.blocks),
            "attention": sorted(plan.attentions),
            "moe": sorted(plan.mixtures),
            "mlp": sorted(plan.mlps),
            "why not": plan.declined,
        },
        "fused columns": sorted(plan.fused_columns),
        "te linears": sorted(plan.te_linears),
        "8 bits": sorted(plan.weights_in_8_bits),
    }


def _placement(plan: Any, one: Any) -> dict[str, Any]:
    return {**asdict(one), "local shape": plan.local_shape(one)}


def _tp_facts(facts: Any) -> dict[str, Any]:
    sets = ("gather", "scatter", "partial", "sequence", "complete", "whole_inputs", "inside", "rows_inside")
    return {
        **{name: sorted(getattr(facts, name)) for name in (*sets, "overwritten", "by_heads", "forked")},
        "met": sorted(facts.readers),
        "regions": {
            path: {
                "arguments": region.slots,
                "columns": sorted(region.columns),
                "needed": path in facts.needed_regions,
                "whole arguments": _sorted(facts.whole_slots.get(path, ())),
            }
            for path, region in facts.regions.items()
        },
        "exits": {path: _plain(leaves) for path, leaves in facts.exits.items()},
        "hooked outputs": {path: _plain(leaves) for path, leaves in facts.recorded.items()},
        "sliced arguments": {f"{arg.path} {arg.slot}": _plain(part) for arg, part in facts.parts.items()},
        "split arguments": {path: _sorted(slots) for path, slots in facts.split_slots.items()},
        "read elsewhere": facts.read_elsewhere,
        "without rule": {operator: sorted(paths) for operator, paths in facts.without_rule.items()},
        "cut sizes": {path: sorted(sizes) for path, sizes in facts.cut_sizes.items()},
        "shared": sorted(map(list, facts.shared)),
        "attention": facts.attention,
        "experts": facts.experts,
        "stage inputs cut along": {str(_plain(place)): dim for place, dim in facts.stage_inputs.items()},
    }


def _cp_facts(facts: Any) -> dict[str, Any]:
    return {
        "regions": {path: _plain(region) for path, region in facts.regions.items()},
        "attention": sorted(facts.attention),
        "hooked outputs": {path: _plain(leaves) for path, leaves in facts.recorded.items()},
        "takes positions": facts.takes_positions,
    }


def _packed_facts(facts: Any) -> dict[str, Any]:
    return {"problems": [str(problem) for problem in facts.problems], "hands on bounds": facts.hands_on_bounds}


def _layers(layers: Any) -> dict[str, Any]:
    return {
        "path": layers.layers,
        "count": layers.count,
        "called": layers.called,
        "before": sorted(layers.before),
        "between": sorted(layers.between),
        "after": sorted(layers.after),
        "uncuttable": layers.uncuttable,
        "repeated": layers.repeated,
        "stage inputs": sorted(str(_plain(side)) for side in layers.stage_inputs),
        "loss": _plain(layers.loss),
        "hidden state": _plain(layers.slot),
    }


def _stages(session: Any) -> dict[str, Any] | None:
    """Layers of each stage, and what crosses each boundary: shape and bytes of what is beside the hidden state."""
    import torch

    from megasched.analysis.find_layer_stack import measure_stage_inputs

    layers = session.stage_layers(_LENGTH)
    if layers is None:
        return None
    structure, start, crossing = session.plan.structure, 0, {}
    measured = measure_stage_inputs(session.replaced, structure, 1, _LENGTH, torch.float32)
    for count in layers[:-1]:
        start += count
        tensors = [
            measured[side.places[0]] for side in structure.stage_inputs_at(start) if side.places[0] in measured
        ]
        crossing[start] = sorted([list(one.shape), str(one.dtype), one.nbytes] for one in tensors)
    return {"layers": layers, "stage inputs": crossing}


def _flops(session: Any) -> dict[str, Any]:
    flops = session.forward_flops(_LENGTH)
    return {"before": flops.before, "layers": flops.layers, "after": flops.after}


def _printed(folder: str, layout: ParallelDims) -> dict[str, Any]:
    from megasched.cli.show.explain import explain_schedule
    from megasched.cli.show.report import inspect_schedule

    explained = explain_schedule("auto", folder, layout, sequence_length=_LENGTH).to_dict()
    shown = inspect_schedule("auto", folder, layout, sequence_length=_LENGTH).to_dict()
    return {"explain": explained, "show": shown}


def _sorted(values: Any) -> list[Any]:
    return sorted(values, key=lambda value: (str(type(value)), value))


def _plain(value: Any) -> Any:
    """The same of plain data, without the names of classes and fields."""
    if isinstance(value, Mapping):
        return sorted([str(_plain(key)), _plain(item)] for key, item in value.items())
    if isinstance(value, set | frozenset):
        return sorted(map(str, map(_plain, value)))
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return [_plain(getattr(value, name)) for name in value.__dataclass_fields__]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def dump(types: list[str], layouts: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """``TYPE LAYOUT`` and what is decided there."""
    from megasched.definition.small_models.small_models import small_config

    for model_type in types:
        with tempfile.TemporaryDirectory() as folder:
            try:
                small_config(model_type).save_pretrained(folder)
            except (MegaschedError, ImportError, ValueError) as error:
                yield model_type, {"no model": type(error).__name__}
                continue
            for name in layouts:
                made = dump_of(folder, ParallelDims(**LAYOUTS[name]))
                text = json.dumps(made, sort_keys=True, default=str).replace(folder, "MODEL")
                text = _AT.sub("", text)
                yield f"{model_type} {name}", json.loads(text)


def differences(before: Any, after: Any, place: str = "") -> Iterator[str]:
    """Where two dumps differ, a line each."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            where = f"{place} / {key}" if place else key
            yield from differences(before.get(key, "(nothing)"), after.get(key, "(nothing)"), where)
    elif before != after:
        yield f"{place}: {_short(before)} is now {_short(after)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 200 else f"{text[:200]}..."


def _read(path: str) -> Any:
    return json.loads(lzma.decompress(Path(path).read_bytes()))


def main(argv: list[str] | None = None) -> int:
    """Writes a dump, or compares two; the exit status is 1 where they differ."""
    from megasched.definition.small_models.small_models import causal_lm_types

    parser = argparse.ArgumentParser(prog="python -m tests.house.dump", description=__doc__)
    parser.add_argument("output", nargs="?", help="where the dump goes")
    parser.add_argument("--types", nargs="+", help="model types; all by default")
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--compare", nargs=2, metavar=("BEFORE", "AFTER"))
    options = parser.parse_args(argv)
    if options.compare:
        lines = list(differences(*map(_read, options.compare)))
        print("\n".join(lines))
        return 1 if lines else 0
    if options.output is None:
        parser.error("say where the dump goes")
    warnings.filterwarnings("ignore")
    made = {}
    for place, decided in dump(options.types or causal_lm_types(), options.layouts):
        made[place] = decided
        print(place, *({"refused", "fails"} & decided.keys()), file=sys.stderr, flush=True)
    Path(options.output).write_bytes(lzma.compress(json.dumps(made, sort_keys=True).encode()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
