"""What the ranks of a layout write: every value once, whatever the layout, and the same bits when exported."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from megasched.language.parallel_dims import ParallelDims
from megasched.weights.hf.folder import HFFolder
from megasched.weights.torch_dist.writer import TorchDistWriter
from tests.weights.test_round_trip import assert_same_bits, export
from tests.weights.test_traced_functions import InMemory

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "gpt2", "opt", "gpt_neox"]
EXPERTS = ["mixtral", "qwen3_moe", "deepseek_v3"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@st.composite
def cases(draw):
    """(family, changes of its config, layout, dtype)."""
    family = draw(st.sampled_from(FAMILIES + EXPERTS))
    layers = draw(st.integers(2, 4))
    changes = {"num_hidden_layers": layers, "vocab_size": draw(st.integers(60, 130))}
    if family not in ("gpt2", "opt"):
        changes |= {"tie_word_embeddings": draw(st.booleans()), "intermediate_size": 8 * draw(st.integers(1, 12))}
    tp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    vpp = 2 if pp == 2 and layers == 4 and draw(st.booleans()) else None
    ep = draw(st.sampled_from([1, 2, 4])) if family in EXPERTS else 1
    layout = ParallelDims(
        tensor_model_parallel_size=tp if ep == 1 else 1,
        sequence_parallel=tp > 1 and ep == 1 and draw(st.booleans()),
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=ep,
    )
    return family, changes, layout, draw(st.sampled_from(DTYPES))


@contextmanager
def groups_of(rank: int, layout: ParallelDims) -> Iterator[None]:
    """Megatron's groups as one of the TP x EP ranks of a stage sees them; nothing is sent in them."""
    import torch.testing._internal.distributed.fake_pg
    from megatron.core import parallel_state

    torch.distributed.init_process_group("fake", rank=rank, world_size=layout.tp * layout.ep)
    try:
        parallel_state.initialize_model_parallel(
            layout.tp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def entries_of_rank(session, source, stages, dtype):
    """Every tensor that this rank writes, of all stages."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megasched.planner.measure.build_stage import Setting, transformer_config
    from megasched.trainer.scheduled_model import ScheduledModel

    config = transformer_config(session, Setting(1, 16, dtype, None))
    config.pipeline_model_parallel_size = session.plan.layout.pp
    for stage in stages:
        model = ScheduledModel(
            config,
            session.copy_of_definition(),
            session.schedule,
            session.plan,
            stage,
            source,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            stages=stages,
        )
        entries = model.sharded_state_dict()
        apply_factories(entries)
        for entry in nested_values(entries):
            assert isinstance(entry, ShardedTensor)
            if is_main_replica(entry.replica_id):
                yield entry


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(case=cases())
@example(
    case=("longcat_flash", {"num_hidden_layers": 4}, ParallelDims(expert_model_parallel_size=2), torch.float32)
)
def test_every_layout_writes_every_value_once(tiny, trained, tmp_path_factory, case):
    from megasched.planner.measure.probe import emulated_cuda
    from megasched.planner.memory import stages_of
    from megasched.trainer.session import open_session

    family, changes, layout, dtype = case
    folder = tmp_path_factory.mktemp("case")
    trained(tiny(family, **changes)).save_pretrained(folder / "made")
    # Cast as transformers casts: some stay in float32.
    AutoModelForCausalLM.from_pretrained(folder / "made", dtype=dtype).save_pretrained(folder / "hf")
    session = open_session("auto", str(folder / "hf"), layout, make_vocab_size_divisible_by=4)
    source = HFFolder(folder / "hf", session.definition)
    stages = stages_of(session, layout, 16)
    full: dict[str, torch.Tensor] = {}
    times: dict[str, torch.Tensor] = {}
    with emulated_cuda():
        for rank in range(layout.tp * layout.ep):
            with groups_of(rank, layout):
                for entry in entries_of_rank(session, source, stages, dtype):
                    value = full.setdefault(entry.key, torch.zeros(entry.global_shape, dtype=entry.dtype))
                    shape = (1,) * entry.prepend_axis_num + entry.local_shape  # of an expert by itself
                    ranges = zip(entry.global_offset, shape, strict=True)
                    place = tuple(slice(start, start + length) for start, length in ranges)
                    value[place] = entry.data.detach()
                    times.setdefault(entry.key, torch.zeros(entry.global_shape, dtype=torch.int))[place] += 1
    assert all((count == 1).all() for count in times.values())
    (folder / "ckpt").mkdir()
    writer = TorchDistWriter(folder / "ckpt", lambda count: None)
    for key, value in full.items():
        writer.add(key, InMemory(value, []), value.dtype)
    padding = {"make_vocab_size_divisible_by": 4, "tensor_model_parallel_size": layout.tp}
    writer.finish({"args": Namespace(**padding)})
    export(folder / "ckpt", folder / "back", hf_model=folder / "hf")
    assert_same_bits(folder / "hf", folder / "back")
    shutil.rmtree(folder)
