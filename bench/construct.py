"""Time and memory to plan and build ONE rank of a large model, against its number of layers.

One process stands for one rank of TP x PP, in process groups that send nothing (torch's fake backend). The
definition is on meta until its shards are made, and only those of this rank are. Measured is CPU time of the
process, which other work on the machine disturbs less than the clock, and resident memory above the imports'.

Weights are random, as ``--hf-random-init`` makes them: one whole parameter at a time, in float32. Drawing them
takes nearly all of the time then; ``--zeros`` leaves it out, and shows what planning and building cost.

    python bench/construct.py --shape 405b --tp 8 --pp 63
    python bench/construct.py --shape 405b --tp 8 --pp 16 --zeros --layers 16 32 63 126
    python bench/construct.py --shape 405b --tp 8 --pp 8 --plan-only --layers 8 16 32 64 126
    python bench/construct.py --shape 70b --tp 8 --pp 16
    python bench/construct.py --shape 8b --tp 4 --pp 4 --every-stage
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import machine
import memory
from shapes import SHAPES, hf_config, model_folder


class Zeros:
    """A weight source that takes no time: see ``megasched.weights.source.WeightSource``."""

    def local(self, placement: Any, rank: int, size: int) -> Any:
        import torch

        return torch.zeros(()).expand(placement.local_shape(size))

    def buffer(self, name: str) -> None:
        return None

    def check(self, names: Any) -> None:
        return None


def measure_one(shape: str, layers: int, tp: int, pp: int, pp_rank: int, values: str) -> dict[str, Any]:
    """Plans, and builds stage ``pp_rank`` of TP rank 0, in this process.

    Args:
        values: ``random`` or ``zeros``; ``none`` only plans.

    Returns:
        Seconds of CPU time and bytes; ``imports_*`` is what the imports took, the others come on top of it.
    """
    started = time.process_time()
    from transformers import LlamaForCausalLM  # noqa: F401  (transformers imports a class when it is asked for)

    from megasched.language.parallel_dims import ParallelDims
    from megasched.trainer.session import open_session

    found: dict[str, Any] = {"layers": layers, "tp": tp, "pp": pp}
    found["imports_seconds"] = time.process_time() - started
    found["imports_bytes"] = base = memory.peak_resident_bytes()
    folder = model_folder(shape, num_hidden_layers=layers)
    layout = ParallelDims(tensor_model_parallel_size=tp, sequence_parallel=tp > 1, pipeline_model_parallel_size=pp)
    start = time.process_time()
    session = open_session("auto", folder, layout)
    counts = session.stage_layers(SHAPES[shape]["max_position_embeddings"]) or [layers]
    assert session.plan.placements
    found["plan_seconds"] = time.process_time() - start
    found["plan_bytes"] = memory.peak_resident_bytes() - base
    if values == "none":
        return found
    from megasched.weights.random_init import RandomInit

    source = RandomInit(session.definition, 1234) if values == "random" else Zeros()
    return {**found, "values": values, **build_stage(session, counts, shape, layout, pp_rank, source)}


def build_stage(
    session: Any, counts: list[int], shape: str, layout: Any, pp_rank: int, source: Any
) -> dict[str, Any]:
    """Builds stage ``pp_rank`` of TP rank 0 in bf16, in this process.

    Args:
        counts: layers of each stage.
        source: of the weights.

    Returns:
        CPU seconds, seconds on the clock, and bytes; ``build_peak_bytes`` are above what was resident before.
    """
    import torch

    from megasched import patches

    patches.apply("host_cuda", force=True)
    import torch.testing._internal.distributed.fake_pg
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megasched.trainer.scheduled_model import ScheduledModel
    from megasched.trainer.stages.stage import Stage

    tp, pp = layout.tp, layout.pp
    # Megatron's ranks are laid out TP first, PP last.
    torch.distributed.init_process_group("fake", rank=pp_rank * tp, world_size=tp * pp)
    parallel_state.initialize_model_parallel(tp, pp, create_gloo_process_groups=False)
    hf = hf_config(shape)
    config = TransformerConfig(
        num_layers=sum(counts),
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        sequence_parallel=layout.sp,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
    )
    memory.reset_peak()
    base, start, clock = memory.resident_bytes(), time.process_time(), time.perf_counter()
    first = sum(counts[:pp_rank])
    chunk = ScheduledModel(
        config,
        session.copy_of_definition(),
        session.schedule,
        session.plan,
        Stage(first, first + counts[pp_rank], pp_rank == 0, pp_rank == len(counts) - 1),
        source,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    shards = sum(p.numel() * p.element_size() for p in chunk.parameters())
    whole = [
        p.numel() for name, p in session.definition.named_parameters() if chunk._here(name.rpartition(".")[0])
    ]
    return {
        "stage": pp_rank,
        "stage_layers": counts[pp_rank],
        "build_seconds": time.process_time() - start,
        "build_clock_seconds": time.perf_counter() - clock,
        "build_peak_bytes": memory.peak_resident_bytes() - base,
        "shard_bytes": shards,
        "largest_parameter_bytes_float32": max(whole) * 4,
    }


def growth(rows: list[dict[str, Any]], key: str) -> dict[str, float]:
    """Least squares line of ``key`` over the layers, and how far a layer of the largest is from one of it.

    Returns:
        ``base`` and ``per_layer``; ``bend``: cost of a layer in the upper half of the range divided by that in
        the lower half, 1 for linear growth (more for faster).
    """
    points = sorted((row["layers"], row[key]) for row in rows)
    count = len(points)
    mean_x, mean_y = (sum(point[axis] for point in points) / count for axis in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    middle = points[count // 2]
    lower, upper = ((b[1] - a[1]) / (b[0] - a[0]) for a, b in ((points[0], middle), (middle, points[-1])))
    return {"base": mean_y - slope * mean_x, "per_layer": slope, "bend": upper / lower}


def _in_a_process(*values: Any) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, __file__, "--one", json.dumps(values)], capture_output=True, text=True, check=False
    )
    if run.returncode:
        sys.exit(run.stderr)
    return json.loads(run.stdout.strip().splitlines()[-1])


def _line(row: dict[str, Any]) -> str:
    text = f"{row['layers']} layers: imports {row['imports_seconds']:.1f} s, plan {row['plan_seconds']:.1f} s, "
    text += f"{(row['imports_bytes'] + row['plan_bytes']) / 1e9:.2f} GB"
    if "stage" in row:
        text += (
            f"; stage {row['stage']} of {row['pp']} ({row['stage_layers']} layers): {row['build_seconds']:.1f} s, "
        )
        text += f"shards {row['shard_bytes'] / 1e9:.2f} GB, peak {row['build_peak_bytes'] / 1e9:.2f} GB"
    return text


def main() -> None:
    own = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own.add_argument("--shape", choices=SHAPES, default="405b")
    own.add_argument("--tp", type=int, default=8)
    own.add_argument("--pp", type=int, default=16)
    own.add_argument("--layers", type=int, nargs="+", help="numbers of layers; by default the shape's own")
    own.add_argument("--stage", type=int, help="pipeline rank that is built; by default one in the middle")
    own.add_argument("--every-stage", action="store_true")
    values = own.add_mutually_exclusive_group()
    values.add_argument("--plan-only", action="store_const", dest="values", const="none", default="random")
    values.add_argument("--zeros", action="store_const", dest="values", const="zeros")
    own.add_argument("--name", help="of the results file; made from the options otherwise")
    own.add_argument("--one", help=argparse.SUPPRESS)
    options = own.parse_args()
    if options.one:
        print(json.dumps(measure_one(*json.loads(options.one))))
        return
    stage = options.pp // 2 if options.stage is None else options.stage
    stages = range(options.pp) if options.every_stage else [stage]
    rows = []
    for layers in options.layers or [SHAPES[options.shape]["num_hidden_layers"]]:
        for number in stages:
            row = _in_a_process(options.shape, layers, options.tp, options.pp, number, options.values)
            rows.append(row)
            print(_line(row), flush=True)
    data = {"shape": options.shape, "tp": options.tp, "pp": options.pp, "rows": rows}
    if len({row["layers"] for row in rows}) > 2:
        keys = ("plan_seconds", "plan_bytes", "build_seconds", "build_peak_bytes")
        data["growth"] = {key: growth(rows, key) for key in keys if key in rows[0]}
    what = {"none": "plan", "zeros": "construct_zeros", "random": "construct"}[options.values]
    print(machine.write(options.name or f"{what}_{options.shape}_tp{options.tp}_pp{options.pp}", data))


if __name__ == "__main__":
    main()
