"""Time and memory to load, import and export the weights of a model of 2.5 GB, against ``cp`` of the same bytes.

The HF folder is made on the spot: random values in bf16, in shards of 500 MB. Each measurement is a process of its
own. Loading is that of one rank of TP x PP, in process groups that send nothing (torch's fake backend). Files are
in the page cache, for ``cp`` as for the others. Each is taken several times, in turn: times are medians.

    python bench/weights.py
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import construct
import machine
import memory
from shapes import SHAPES, hf_config

SHARD = 500_000_000


def quiet(total: int) -> Any:
    return nullcontext(lambda count: None)


def make_folder(folder: Path, shape: str) -> int:
    """An HF folder with random weights; returns their bytes."""
    import torch

    from megasched.definition.build import build_definition
    from megasched.weights.hf.writer import Output, write_weights
    from megasched.weights.source import canonical_names

    class Random:
        def __init__(self, size: tuple[int, ...]) -> None:
            self.shape, self.dtype = size, torch.bfloat16

        def read(self, box: Any) -> Any:
            return torch.randn([stop - start for start, stop in box], dtype=torch.bfloat16)

    config = hf_config(shape)
    definition = build_definition(config)
    state = definition.state_dict()
    names = dict.fromkeys(canonical_names(definition).values())
    outputs: list[Any] = [Output(name, Random(tuple(state[name].shape)), torch.bfloat16) for name in names]
    folder.mkdir()
    config.save_pretrained(folder)
    write_weights(folder, outputs, SHARD, lambda count: None)
    return sum(output.nbytes for output in outputs)


def measure_load(folder: str, shape: str, tp: int, pp: int, pp_rank: int) -> dict[str, Any]:
    """Builds one stage of TP rank 0 from the folder, in this process."""
    from megasched.language.parallel_dims import ParallelDims
    from megasched.trainer.session import open_session
    from megasched.weights import lazy
    from megasched.weights.hf.folder import HFFolder

    layout = ParallelDims(tensor_model_parallel_size=tp, sequence_parallel=tp > 1, pipeline_model_parallel_size=pp)
    session = open_session("auto", folder, layout)
    counts = session.stage_layers(SHAPES[shape]["max_position_embeddings"]) or [session.plan.structure.count]
    read = 0
    original = lazy.Stored.read

    def counted(self: Any, box: Any) -> Any:
        nonlocal read
        values = original(self, box)
        read += values.nbytes
        return values

    lazy.Stored.read = counted  # type: ignore[method-assign]
    built = construct.build_stage(session, counts, shape, layout, pp_rank, HFFolder(folder, session.definition))
    return {
        "seconds": built["build_clock_seconds"],
        "peak_bytes": built["build_peak_bytes"],
        "shard_bytes": built["shard_bytes"],
        "read_bytes": read,
    }


def measure_transfer(kind: str, source: str, target: str) -> dict[str, Any]:
    """Imports or exports, in this process."""
    from transformers import LlamaForCausalLM  # noqa: F401  (a class is imported when it is asked for)

    from megasched.weights.exporting import export_weights
    from megasched.weights.importing import import_weights

    warm_pages(source)
    memory.reset_peak()
    base, clock = memory.resident_bytes(), time.perf_counter()
    if kind == "import":
        import_weights(source, target, progress=quiet)
    else:
        export_weights(source, target, progress=quiet, max_shard_size=SHARD)
    return {"seconds": time.perf_counter() - clock, "peak_bytes": memory.peak_resident_bytes() - base}


def in_a_process(*values: Any) -> dict[str, Any]:
    os.sync()  # what others have written is not waited for in what is measured
    command = [sys.executable, __file__, "--one", json.dumps(values)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(run.stderr)
    return json.loads(run.stdout.strip().splitlines()[-1])


def warm_pages(source: str) -> None:
    """Touches as much free memory as the files in a folder take, and gives it back.

    A virtual machine's host takes free pages away after seconds, and gives them back slowly: what happens to be
    written first to them would pay for it.
    """
    size = sum(path.stat().st_size for path in Path(source).rglob("*") if path.is_file())
    held = bytearray(size)
    held[:: 1 << 12] = b"1" * len(range(0, size, 1 << 12))
    del held


def measure_copy(source: str, target: str) -> dict[str, Any]:
    """``cp``, with the bytes really written where the file system could let two files share them."""
    warm_pages(source)
    clock = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", source, target], check=True)
    return {"seconds": time.perf_counter() - clock}


def measure_all(folder: Path, shape: str, tp: int, pp: int, times: int) -> dict[str, Any]:
    size = make_folder(folder / "hf", shape)
    rows: dict[str, list[dict[str, Any]]] = {}
    for _ in range(times):
        rows.setdefault("`cp`", []).append(in_a_process("copy", str(folder / "hf"), str(folder / "copied")))
        paths = [str(folder / "hf"), str(folder / "ckpt")]
        rows.setdefault("`megasched import`", []).append(in_a_process("import", *paths))
        paths = [str(folder / "ckpt"), str(folder / "exported")]
        rows.setdefault("`megasched export`", []).append(in_a_process("export", *paths))
        for name in ("copied", "ckpt", "exported"):
            shutil.rmtree(folder / name)
        for rank in range(pp):
            name = f"load of TP rank 0, PP rank {rank}, of TP {tp} x PP {pp}"
            rows.setdefault(name, []).append(in_a_process("load", str(folder / "hf"), shape, tp, pp, rank))
    copied = statistics.median(row["seconds"] for row in rows["`cp`"])
    found = []
    for what, runs in rows.items():
        seconds = statistics.median(row["seconds"] for row in runs)
        row = {**runs[0], "what": what, "seconds": seconds}
        if "peak_bytes" in row:
            row["peak_bytes"] = max(run["peak_bytes"] for run in runs)
        if what != "`cp`" and "shard_bytes" not in row:
            row["ratio_to_copy"] = seconds / copied
        found.append(row)
    return {"shape": shape, "bytes": size, "transfers": found}


def main() -> None:
    own = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own.add_argument("--shape", choices=SHAPES, default="1b")
    own.add_argument("--tp", type=int, default=2)
    own.add_argument("--pp", type=int, default=2)
    own.add_argument("--times", type=int, default=3)
    own.add_argument("--folder", help="where some 8 GB are free; the system's for temporary files otherwise")
    own.add_argument("--name", default="weights", help="of the results file")
    own.add_argument("--one", help=argparse.SUPPRESS)
    options = own.parse_args()
    if options.one:
        kind, *values = json.loads(options.one)
        measures = {"load": measure_load, "copy": measure_copy}
        found = measures[kind](*values) if kind in measures else measure_transfer(kind, *values)
        print(json.dumps(found))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        data = measure_all(Path(folder), options.shape, options.tp, options.pp, options.times)
    for row in data["transfers"]:
        print(row)
    print(machine.write(options.name, data))


if __name__ == "__main__":
    main()
