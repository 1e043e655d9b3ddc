"""What ``show`` says of each module: classes, shapes, transfers, gradients."""

from dataclasses import replace

import pytest

from megasched.analysis.tp.facts import Region, TpFacts
from megasched.cli.show.communication import Transfer, transfers
from megasched.cli.show.report import inspect_schedule
from megasched.errors import ScheduleError
from megasched.language.parallel_dims import ParallelDims
from megasched.plan.communication import shared_regions
from megasched.plan.plan import Plan
from megasched.trainer.session import open_session
from tests import tiny

LAYER = "model.layers.1"


def modules(report):
    return {module.path: module for module in report.modules}


def weight(module):
    return next(parameter for parameter in module.parameters if parameter.name == "weight")


def test_local_shapes_at_tp_2(inspect):
    found = modules(inspect(tp=2))
    expected = {
        "model.embed_tokens": ("VocabParallelEmbedding", (300, 32), (256, 32)),
        f"{LAYER}.self_attn.q_proj": ("ColumnParallelLinear", (32, 32), (16, 32)),
        f"{LAYER}.self_attn.k_proj": ("ColumnParallelLinear", (8, 32), (4, 32)),
        f"{LAYER}.self_attn.o_proj": ("RowParallelLinear", (32, 32), (32, 16)),
        f"{LAYER}.mlp.up_proj": ("ColumnParallelLinear", (64, 32), (32, 32)),
        f"{LAYER}.mlp.down_proj": ("RowParallelLinear", (32, 64), (32, 32)),
        f"{LAYER}.input_layernorm": ("LlamaRMSNorm", (32,), (32,)),
        "lm_head": ("ColumnParallelLinear", (300, 32), (256, 32)),
    }
    for path, (becomes, shape, local) in expected.items():
        assert (found[path].becomes, weight(found[path]).shape, weight(found[path]).local_shape) == (
            becomes,
            shape,
            local,
        ), path
    assert weight(found["lm_head"]).padded == 512
    assert found[f"{LAYER}.self_attn.q_proj"].hf_class == "Linear"
    assert found[f"{LAYER}.self_attn"].notes == ("8 query heads, 4 on each rank",)
    assert "logits stay cut over the vocabulary, up to the loss" in found["lm_head"].notes


def test_parameters_are_those_of_the_definition(inspect, llama):
    from megasched.definition.build import build_definition, load_config

    definition = build_definition(load_config(llama))
    assert inspect(tp=2).parameters == sum(parameter.numel() for parameter in definition.parameters())


def test_transfers_at_tp_2(inspect):
    found = modules(inspect(tp=2))
    assert found[f"{LAYER}.mlp"].transfers == (
        Transfer("backward", "all_reduce", "input", ("gate_proj", "up_proj")),
    )
    assert found[f"{LAYER}.mlp.up_proj"].transfers == ()
    assert found[f"{LAYER}.mlp.down_proj"].transfers == (Transfer("forward", "all_reduce", "output"),)
    assert found["model.embed_tokens"].transfers == (Transfer("forward", "all_reduce", "output"),)
    of_loss = Transfer("forward", "all_reduce", "loss", features=1, value_bytes=4)
    assert found["lm_head"].transfers == (Transfer("backward", "all_reduce", "input"), *3 * [of_loss])


@pytest.mark.parametrize(("level", "sent"), [("fused", True), ("block", False)])
def test_tokens_of_a_mixture_under_sequence_parallelism(tmp_path, level, sent):
    """HF's reads those of all ranks; Megatron's has each rank's part."""
    schedule = tmp_path / "level.py"
    schedule.write_text(
        "from megasched.model_adapters.default_schedule import schedule as default\n\n\n"
        f"def schedule(sch, layout):\n    default(sch, layout)\n    sch['model.layers.*'].level('{level}')\n"
    )
    layout = ParallelDims(tensor_model_parallel_size=2, sequence_parallel=True)
    found = modules(inspect_schedule(str(schedule), tiny.save("mixtral", tmp_path / "model"), layout))
    wanted = (("forward", "all_gather", "input"), ("backward", "reduce_scatter", "input"))
    assert found["model.layers.1.mlp"].transfers == tuple(Transfer(*one, features=32) for one in wanted if sent)
    assert found["model.layers.1"].becomes == (
        "Megatron's TransformerLayer" if level == "block" else "MixtralDecoderLayer"
    )


def test_transfers_and_gradients_under_sequence_parallelism(inspect):
    found = modules(inspect(tp=2, sp=True))
    columns = ("q_proj", "k_proj", "v_proj")
    assert found[f"{LAYER}.self_attn"].transfers == (
        Transfer("forward", "all_gather", "input", columns),
        Transfer("backward", "reduce_scatter", "input", columns),
    )
    both = ("gate_proj", "up_proj")
    assert found[f"{LAYER}.mlp"].transfers == (
        Transfer("forward", "all_gather", "input", both),
        Transfer("backward", "all_gather", "input", both),  # for the gradient of the weights
        Transfer("backward", "reduce_scatter", "input", both),
    )
    assert found[f"{LAYER}.mlp.down_proj"].transfers == (
        Transfer("forward", "reduce_scatter", "output"),
        Transfer("backward", "all_gather", "output"),
    )
    assert weight(found[f"{LAYER}.input_layernorm"]).partial_gradient
    assert not weight(found["model.norm"]).partial_gradient
    assert not weight(found[f"{LAYER}.mlp.up_proj"]).partial_gradient


def test_what_is_shared_is_named_in_the_order_of_the_definition(llama):
    session = open_session("auto", llama, ParallelDims(tensor_model_parallel_size=2))
    plan = replace(
        session.plan, fused_columns=tuple(tuple(reversed(paths)) for paths in session.plan.fused_columns)
    )
    assert transfers(plan)[f"{LAYER}.self_attn"][0].shared_by == ("q_proj", "k_proj", "v_proj")


def test_one_linear_alone_shares_nothing_unless_its_heads_are_viewed_by_the_length():
    tp_facts = TpFacts(
        regions={
            "mlp": Region((0,), ("mlp.up",)),
            "attn": Region((0,), ("attn.qkv",)),
            "pair": Region((0,), ("pair.gate", "pair.up")),
        },
        by_heads={"attn.qkv"},
    )
    layout = {"tensor_model_parallel_size": 2}
    plan = Plan(ParallelDims(**layout), (), tp_facts=tp_facts)
    assert shared_regions(plan) == {"pair": ((0,), ("pair.gate", "pair.up"))}
    plan = Plan(ParallelDims(**layout, sequence_parallel=True), (), tp_facts=tp_facts)
    assert shared_regions(plan) == {"attn": ((0,), ("attn.qkv",)), "pair": ((0,), ("pair.gate", "pair.up"))}


def test_fewer_kv_heads_than_ranks(inspect):
    module = modules(inspect(tp=4))[f"{LAYER}.self_attn.k_proj"]
    assert module.kind == "replicated"
    assert module.becomes == "replicated (kv heads 2 < TP 4, each rank uses one)"
    assert weight(module).local_shape == (8, 32)
    assert weight(module).partial_gradient


def test_one_rank_sends_nothing(inspect):
    report = inspect()
    assert all(not module.transfers for module in report.modules)
    assert all(p.shape == p.local_shape for m in report.modules for p in m.parameters if p.padded is None)


def test_calls_are_told_with_their_lines(inspect):
    found = modules(inspect('sch["model.layers"][::2].checkpoint()', tp=2))
    assert found["model.layers.2"].recompute
    assert not found["model.layers.1"].recompute
    asked = found["model.layers.2.mlp.up_proj"].asked
    assert [(a.primitive, a.call, a.source.rpartition("/")[2]) for a in asked] == [
        ("shard", "shard(param='weight', axis=0)", "mysched.py:8")
    ]
    assert found["model.layers.2"].asked[0].source.endswith("mysched.py:11")


def test_the_default_schedule_names_no_line(inspect):
    report = inspect(schedule="auto", tp=2)
    assert {record.source for record in report.records} == {"--model-schedule auto"}
    assert weight(modules(report)[f"{LAYER}.self_attn.q_proj"]).local_shape == (16, 32)


def test_a_replaced_module_names_both_classes(inspect):
    report = inspect(
        "import torch",
        'sch.root.replace_all(r"model.norm", lambda old: torch.nn.RMSNorm(old.weight.shape[0]))',
        tp=2,
    )
    norm = modules(report)["model.norm"]
    assert (norm.hf_class, norm.becomes, norm.kind) == ("LlamaRMSNorm", "RMSNorm", "whole")
    assert norm.asked[0].source.endswith("mysched.py:12")


def test_tied_embeddings(inspect):
    found = modules(inspect(tp=2, pp=2, overrides=["tie_word_embeddings=true"]))
    assert weight(found["lm_head"]).tied_to == "model.embed_tokens.weight"
    note = "tied across stages: gradient summed over the embedding group"
    assert note in found["lm_head"].notes
    assert note in found["model.embed_tokens"].notes


def test_every_parameter_is_told_once(inspect, llama):
    from megasched.definition.build import build_definition, load_config

    told = [
        f"{module.path}.{parameter.name}"
        for module in inspect(tp=2, pp=2).modules
        for parameter in module.parameters
    ]
    assert sorted(told) == sorted(name for name, _ in build_definition(load_config(llama)).named_parameters())


def test_all_problems_are_reported(inspect):
    with pytest.raises(ScheduleError) as caught:
        inspect('sch["model.norm"].shard("bias", axis=0)', 'sch["lm_head"].shard("weight", axis=5)', tp=2)
    assert len(caught.value.problems) >= 2
    assert "mysched.py:11" in str(caught.value)
    assert "mysched.py:12" in str(caught.value)


def test_a_block_says_what_it_becomes(llama, tmp_path):
    from megasched.cli.show.report import inspect_schedule
    from megasched.language.parallel_dims import ParallelDims

    schedule = tmp_path / "block.py"
    schedule.write_text(
        "from megasched.model_adapters.default_schedule import schedule as default\n\n\n"
        "def schedule(sch, layout):\n    default(sch, layout)\n    sch['model.layers.1'].level('block')\n"
    )
    found = modules(inspect_schedule(str(schedule), llama, ParallelDims(tensor_model_parallel_size=2)))
    assert found["model.layers.1"].becomes == "Megatron's TransformerLayer"
    assert found["model.layers.1.mlp.up_proj"].becomes == "in Megatron's layer"
    assert found["model.layers.1.mlp.up_proj"].parameters[0].local_shape == (32, 32)
    assert found["model.layers.0.mlp.up_proj"].becomes == "ColumnParallelLinear"
    assert "by one matrix product with gate_proj" in found["model.layers.0.mlp.up_proj"].notes


@pytest.mark.parametrize("sp", [False, True])
def test_megatrons_attention_and_mlp_alone(llama, tmp_path, sp):
    """One projection of theirs stands for several, and sends what these send together at level ``fused``: there
    the attention keeps the whole sequence for its three, where Megatron's gathers it again."""
    schedule = tmp_path / "parts.py"
    schedule.write_text(
        "from megasched.model_adapters.default_schedule import schedule as default\n\n\n"
        "def schedule(sch, layout):\n    default(sch, layout)\n"
        "    sch['model.layers.*.self_attn'].level('block')\n    sch['model.layers.*.mlp'].level('block')\n"
    )
    layout = ParallelDims(tensor_model_parallel_size=2, sequence_parallel=sp)
    alone, fused = (modules(inspect_schedule(name, llama, layout)) for name in (str(schedule), "auto"))
    assert alone[f"{LAYER}.self_attn"].becomes == "Megatron's SelfAttention"
    assert alone[f"{LAYER}.mlp"].becomes == "Megatron's MLP"
    assert fused[f"{LAYER}.self_attn"].transfers
    again = Transfer("backward", "all_gather", "input", ("q_proj", "k_proj", "v_proj"))
    for path, module in alone.items():
        attention = path.endswith("self_attn")
        assert [one for one in module.transfers if not (attention and one == again)] == list(fused[path].transfers)
        assert (again in module.transfers) == (attention and sp)


def test_what_runs_in_8_bits_is_said(llama, tmp_path):
    from megasched.cli.show.report import inspect_schedule
    from megasched.language.parallel_dims import Fp8

    schedule = tmp_path / "some.py"
    schedule.write_text(
        "from megasched.model_adapters.default_schedule import schedule as default\n\n\n"
        "def schedule(sch, layout):\n    default(sch, layout)\n    sch['model.layers.1'].level('fused')\n"
    )
    layout = ParallelDims(fp8=Fp8(fp8_recipe="blockwise", num_layers_at_start_in_bf16=1))
    found = modules(inspect_schedule(str(schedule), llama, layout))
    assert found["model.layers.0"].notes == ("in 16 bits",)
    assert found["model.layers.2"].notes == ("in 8 bits (blockwise)",)
    up, norm = found["model.layers.1.mlp.up_proj"], found["model.layers.1.input_layernorm"]
    assert up.becomes == "Transformer Engine's Linear, column"
    assert up.notes == ("by one matrix product with gate_proj", "in 8 bits (blockwise)")
    assert norm.notes == ()
