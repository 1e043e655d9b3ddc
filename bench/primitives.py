"""What each primitive costs: the call itself, and what it adds to making the plan; and a whole ``auto`` schedule.

For each primitive a schedule of some calls on every layer is compared with an empty one, on a Llama of the
given number of layers, at one rank: CPU seconds, the two in turn, best of ``--rounds``. The plan of the empty
schedule is what looking at the model costs; with shards in it the activations are followed as well.

    python bench/primitives.py [--layers 16] [--rounds 5]
"""

from __future__ import annotations

import argparse
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import machine
from shapes import SHAPES, model_folder

Calls = Callable[[Any], None]


def _twice(path: str, call: Calls) -> Calls:
    def calls(layer: Any) -> None:
        for name in path.split():
            call(layer[name])

    return calls


def _new_norm(old: Any) -> Any:
    from torch import nn

    return nn.RMSNorm(old.weight.shape[0], eps=old.variance_epsilon, device=old.weight.device)


def _hook(module: Any, *values: Any) -> None:
    """Does nothing."""


def _shard_mlp(mlp: Any) -> None:
    mlp["gate_proj"].shard("weight", axis=0)
    mlp["up_proj"].shard("weight", axis=0)
    mlp["down_proj"].shard("weight", axis=1)


def _fuse(mlp: Any) -> None:
    from megasched.graph import patterns

    mlp.trace()
    mlp.fuse(mlp.find(patterns.swiglu)[0], compiler="megatron")


NORMS = "input_layernorm post_attention_layernorm"
# Primitive -> calls of it on one layer; sync is asked for on shards, find, fuse and decompose with a trace,
# unfreeze beside adapt.
CASES: dict[str, Calls] = {
    "shard": lambda layer: _shard_mlp(layer["mlp"]),
    "replace": _twice(NORMS, lambda node: node.replace(_new_norm)),
    "replace_all": lambda layer: layer.replace_all(r".*layernorm", _new_norm),
    "checkpoint": _twice("self_attn mlp", lambda node: node.checkpoint()),
    "fork_rng": _twice("self_attn mlp", lambda node: node.fork_rng()),
    "annotate": _twice(NORMS, lambda node: node.annotate("weight", "bench", True)),
    "probe": _twice("self_attn mlp", lambda node: node.probe()),
    "hook": _twice(NORMS, lambda node: node.hook("fw_post", _hook)),
    "level": _twice("self_attn mlp", lambda node: node.level("leaf")),
    "sync": lambda layer: (_shard_mlp(layer["mlp"]), layer["mlp.down_proj"].sync("fwd_post", "all_reduce"))[0],
    "trace": lambda layer: layer["mlp"].trace(),
    "trace_until": lambda layer: layer.trace_until("self_attn"),
    "find": lambda layer: layer["mlp"].trace().find(r"act_fn\..*"),
    "find_node": lambda layer: layer["mlp"].trace().find_node(lambda node: node.operation == "silu"),
    "fuse": lambda layer: _fuse(layer["mlp"]),
    "decompose": lambda layer: (layer["mlp.up_proj"].decompose(), layer["mlp"].trace())[0],
    "adapt": _twice("mlp.up_proj mlp.down_proj", lambda node: node.adapt(rank=8)),
    "unfreeze": lambda layer: (layer["mlp.up_proj"].adapt(rank=8), layer["input_layernorm"].unfreeze())[0],
}


def measure(layers: int, rounds: int, shape: str = "tiny") -> dict[str, dict[str, float]]:
    """Name -> seconds of one call, and what the calls add to the plan."""
    folder = model_folder(shape, num_hidden_layers=layers)
    found = {"auto": _compare(folder, None, layers, rounds)}
    for name, calls in CASES.items():
        found[name] = _compare(folder, calls, layers, rounds)
    return found


def _compare(folder: str, calls: Calls | None, layers: int, rounds: int) -> dict[str, float]:
    """Best of the rounds; an empty schedule and the one with these calls (``auto`` for None) in turn."""
    empty, full, called, count = [], [], [], 0
    for _ in range(rounds):
        empty.append(_plan(folder, lambda layer: None)[1])
        call_seconds, plan_seconds, count = _plan(folder, calls)
        called.append(call_seconds)
        full.append(plan_seconds)
    return {
        "records": count,
        "microseconds_per_record": 1e6 * min(called) / max(count, 1),
        "plan_seconds_of_empty": min(empty),
        "plan_seconds_added": min(full) - min(empty),
        "milliseconds_added_per_layer": 1e3 * (min(full) - min(empty)) / layers,
    }


def _plan(folder: str, calls: Calls | None) -> tuple[float, float, int]:
    """CPU seconds of the calls, CPU seconds from there to the plan, and how many records there are."""
    from megasched.definition import attention_interface
    from megasched.definition.build import build_definition, load_config
    from megasched.language.parallel_dims import ParallelDims
    from megasched.language.schedule import create_schedule
    from megasched.layers import attention
    from megasched.layers.megatron.trials import Trials
    from megasched.lowering.replace import replace_modules
    from megasched.model_adapters.default_schedule import schedule as auto
    from megasched.model_adapters.registry import roles_of
    from megasched.plan.make import make_plan

    attention.register()
    definition: Any = build_definition(load_config(folder))
    definition.config._attn_implementation = attention_interface.NAME
    layout = ParallelDims(tensor_model_parallel_size=2)
    sch = create_schedule(definition, layout, roles_of(definition))
    start = time.process_time()
    if calls is None:
        auto(sch, layout)
    else:
        for layer in sch["model.layers"]:
            calls(layer)
    called = time.process_time()
    replace_modules(sch, definition)
    make_plan(sch, model=definition, causal_lm=True, trials=Trials)
    return called - start, time.process_time() - called, len(sch.records)


def main() -> None:
    own = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own.add_argument("--layers", type=int, default=16)
    own.add_argument("--rounds", type=int, default=5)
    own.add_argument("--shape", choices=SHAPES, default="1b")
    options: Namespace = own.parse_args()
    found = measure(options.layers, options.rounds, options.shape)
    for name, row in found.items():
        print(
            f"{name:12} {row['records']:4} records, {row['microseconds_per_record']:7.0f} us a record, "
            f"plan {row['plan_seconds_of_empty']:.2f} s + {row['plan_seconds_added']:.3f} s"
        )
    print(machine.write("primitives", {"layers": options.layers, "shape": options.shape, "primitives": found}))


if __name__ == "__main__":
    main()
