"""Peak memory of building one rank of Llama-3-8B at TP4 x PP4: the plan, this stage's shards, nothing else.

One process stands for one rank of sixteen, in process groups that send nothing (torch's fake backend).
For each stage the peak resident memory above that of the imports is compared with the bytes of its shards.

    python bench/construct_memory.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine

TP, PP = 4, 4
LLAMA_3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}


def peak_bytes() -> int:
    """Highest resident memory of this process so far."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def build_one(pp_rank: int) -> dict[str, Any]:
    """Builds pipeline stage ``pp_rank`` of TP rank 0 and says what it took."""
    import torch

    from megasched import patches

    patches.apply("host_cuda", force=True)
    import torch.testing._internal.distributed.fake_pg
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig
    from transformers import LlamaConfig

    from megasched.layout import Layout
    from megasched.megatron.scheduled_model import ScheduledModel
    from megasched.megatron.session import open_session
    from megasched.megatron.stage import Stage
    from megasched.weights.random_init import RandomInit

    folder = tempfile.mkdtemp(prefix="construct")
    LlamaConfig(**LLAMA_3_8B).save_pretrained(folder)
    # Megatron's ranks are laid out TP first, PP last.
    torch.distributed.init_process_group("fake", rank=pp_rank * TP, world_size=TP * PP)
    parallel_state.initialize_model_parallel(TP, PP, create_gloo_process_groups=False)
    config = TransformerConfig(
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        tensor_model_parallel_size=TP,
        pipeline_model_parallel_size=PP,
        sequence_parallel=True,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
    )
    imported, start = peak_bytes(), time.perf_counter()
    args = _arguments(folder)
    layout = Layout(tensor_model_parallel_size=TP, sequence_parallel=True, pipeline_model_parallel_size=PP)
    session = open_session(args, layout)
    layers = [row.count("t") for row in session.pipeline_layout(8192).split("|")]
    planned, plan_seconds = peak_bytes(), time.perf_counter() - start
    first = sum(layers[:pp_rank])
    chunk = ScheduledModel(
        config,
        session.copy_of_definition(),
        session.schedule,
        session.plan,
        Stage(first, first + layers[pp_rank], pp_rank == 0, pp_rank == PP - 1),
        RandomInit(session.definition, 1234),
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    shards = sum(p.numel() * p.element_size() for p in chunk.parameters())
    whole = [p.shape for name, p in session.definition.named_parameters() if chunk._here(name.rpartition(".")[0])]
    largest = max(shape.numel() for shape in whole) * 4
    return {
        "stage": pp_rank,
        "layers": layers[pp_rank],
        "shard_bytes": shards,
        "largest_parameter_bytes_float32": largest,
        "imports_bytes": imported,
        "plan_bytes": planned - imported,
        "build_bytes": peak_bytes() - imported,
        "plan_seconds": plan_seconds,
        "build_seconds": time.perf_counter() - start,
    }


def _arguments(folder: str) -> Any:
    from argparse import Namespace

    return Namespace(
        model_schedule="auto",
        hf_model=folder,
        hf_override=[],
        trust_remote_code=False,
        make_vocab_size_divisible_by=128,
    )


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(build_one(int(sys.argv[1]))))
        return
    rows = []
    for stage in range(PP):
        run = subprocess.run([sys.executable, __file__, str(stage)], capture_output=True, text=True, check=False)
        if run.returncode:
            sys.exit(run.stderr)
        rows.append(json.loads(run.stdout.strip().splitlines()[-1]))
        row = rows[-1]
        print(
            f"stage {stage}: shards {row['shard_bytes'] / 1e9:.2f} GB, peak above imports "
            f"{row['build_bytes'] / 1e9:.2f} GB (one whole parameter in float32: "
            f"{row['largest_parameter_bytes_float32'] / 1e9:.2f} GB), {row['build_seconds']:.0f} s",
            flush=True,
        )
    machine.write("construct_memory", {"tp": TP, "pp": PP, "stages": rows})


if __name__ == "__main__":
    main()
