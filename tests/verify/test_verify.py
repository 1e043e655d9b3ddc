"""``megasched verify``: what is equal is found equal, and each planted mistake is caught and located."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from megasched.definition.small_models.small_models import small_config
from megasched.errors import ConfigError
from megasched.language.parallel_dims import ParallelDims
from megasched.verify.locate.locate import Finding
from megasched.verify.numbers import Check
from megasched.verify.verify import verify_schedule
from tests.parity.cases import case

FAULTS = Path(__file__).with_name("faults.py")
TP2 = ParallelDims(tensor_model_parallel_size=2)
TP2_SP = ParallelDims(tensor_model_parallel_size=2, sequence_parallel=True)
PP2 = ParallelDims(pipeline_model_parallel_size=2)


def save(model_type, folder, **changes):
    config = small_config(model_type)
    config.update(changes)
    config.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("model_type", "layout"),
    [
        (
            "llama",
            ParallelDims(
                tensor_model_parallel_size=2,
                sequence_parallel=True,
                pipeline_model_parallel_size=2,
                virtual_pipeline_model_parallel_size=3,
            ),
        ),
        ("qwen3_moe", ParallelDims(expert_model_parallel_size=2, data_parallel_size=2)),
        ("gemma2", ParallelDims(context_parallel_size=2, tensor_model_parallel_size=2)),
        ("gpt2", TP2),
    ],
    ids=str,
)
def test_what_is_right_is_found_equal(ranks, tmp_path, model_type, layout):
    found = verify_schedule("auto", save(model_type, tmp_path), layout, ranks=ranks)
    assert (found.verdict, found.why, found.finding) == ("equal", "", None)
    numbers = {check.name: check.error for check in found.checks if check.error is not None}
    rows = ["loss", "logits", "hidden states", "gradients", "gradient norm", "weights", "buffers"]
    rows.append("validation loss")
    assert list(numbers) == [name for name in rows if name != "buffers" or model_type != "gpt2"]
    assert all(error < 1e-5 for name, error in numbers.items() if name != "weights")
    assert numbers["weights"] < 1e-3
    assert found.layers == max(4, layout.pp * layout.vpp)
    if model_type == "gpt2":  # the one with dropouts that are modules
        assert found.checks[-1].name == "dropout masks"


def test_weights_without_numbers_are_equal(ranks, tmp_path):
    """A mixture with shared experts of width 0."""
    config = small_config("aria_text")
    config.moe_num_shared_experts = 0
    config.save_pretrained(tmp_path)
    found = verify_schedule("auto", str(tmp_path), TP2, ranks=ranks)
    assert (found.verdict, found.why, found.finding) == ("equal", "", None)


OF_OTHER_NAMES = """
import torch
from megasched.model_adapters.default_schedule import schedule as auto
from tests.language.replacing import Around


class Mean(torch.nn.Module):
    def __init__(self, old):
        super().__init__()
        self.one, self.other = (torch.nn.Parameter(torch.empty_like(old.weight)) for _ in range(2))
        self.eps = old.variance_epsilon

    def forward(self, x):
        return torch.nn.functional.rms_norm(x, x.shape[-1:], (self.one + self.other) / 2, self.eps)


def schedule(sch, layout):
    auto(sch, layout)
    sch["model.layers.*.input_layernorm"].replace(Around)
    sch["model.layers.*.post_attention_layernorm"].replace(Mean, weights={"one": "weight", "other": "weight"})
"""


def test_replaced_modules_are_compared_by_the_names_of_hf(ranks, tmp_path):
    """One has its parameters below another name, the other has one parameter under two."""
    (tmp_path / "others.py").write_text(OF_OTHER_NAMES)
    layout = ParallelDims(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    found = verify_schedule(f"{tmp_path}/others.py", save("llama", tmp_path / "llama"), layout, ranks=ranks)
    assert (found.verdict, found.why, found.finding) == ("equal", "", None)
    assert {check.name for check in found.checks} >= {"gradients", "weights"}


WRAPPED = """
from megasched.model_adapters.default_schedule import schedule as auto
from tests.language.replacing import Around


def schedule(sch, layout):
    auto(sch, layout)
    for path in ("transformer.wte", "lm_head", "transformer.h.*.attn", "transformer.h.*.mlp.c_fc", "*.ln_f"):
        sch[path].replace(Around)
    sch["transformer.h.1"].replace(Around)
    sch["transformer.h.*.attn.inner.c_proj"].replace(Around)
    sch["transformer.h.1.inner.mlp"].checkpoint()


def base(sch, layout):
    auto(sch, layout)
    sch["transformer"].replace(Around)


def one_side(sch, layout):
    auto(sch, layout)
    sch["transformer.wte"].replace(Around)
"""


def test_all_is_equal_and_cut_inside_of_what_replaces_it(ranks, tmp_path):
    """Both sides of the tied embedding, projections and layers, some of them twice."""
    (tmp_path / "wrapped.py").write_text(WRAPPED)
    layout = ParallelDims(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    found = verify_schedule(f"{tmp_path}/wrapped.py", save("gpt2", tmp_path / "gpt2"), layout, ranks=ranks)
    assert (found.verdict, found.why, found.finding) == ("equal", "", None)
    assert {check.name for check in found.checks} >= {"loss", "gradients", "weights"}


def test_stages_agree_on_a_tie_of_which_one_side_is_replaced(ranks, tmp_path):
    """A stage has one side of it. Where they do not agree, one waits for the other without end."""
    (tmp_path / "wrapped.py").write_text(WRAPPED)
    layout = ParallelDims(pipeline_model_parallel_size=2)
    found = verify_schedule(
        f"{tmp_path}/wrapped.py:one_side", save("gpt2", tmp_path / "gpt2"), layout, ranks=ranks
    )
    assert (found.verdict, found.why, found.finding) == ("equal", "", None)


def test_the_loss_is_right_where_hf_finds_no_head(ranks, tmp_path):
    """HF looks for it through its base model. The vocabulary is padded, whose rows are not of the logits."""
    (tmp_path / "wrapped.py").write_text(WRAPPED)
    layout = ParallelDims(context_parallel_size=2)
    found = verify_schedule(f"{tmp_path}/wrapped.py:base", save("gpt2", tmp_path / "gpt2"), layout, ranks=ranks)
    assert (found.verdict, found.why, found.finding) == ("equal", "", None)


OF_ANOTHER_RELEASE = """
from megasched.model_adapters.registry import Adapter

ADAPTER = Adapter(model_types=("llama",), roles={"model.layers.*.mlp.up": "mlp.up"})
"""


def test_the_ranks_run_under_the_adapter_that_is_given(ranks, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(OF_ANOTHER_RELEASE)
    monkeypatch.chdir(tmp_path)  # where the ranks are not
    found = verify_schedule("auto", save("llama", tmp_path / "llama"), TP2, ranks=ranks, adapter="mine.py")
    assert found.verdict == "refused"
    assert found.why.startswith(
        "the adapter for 'llama' expects modules 'model.layers.*.mlp.up', and the definition"
    )
    (tmp_path / "mine.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=r"^--adapter mine.py:1: the adapter file fails: ZeroDivisionError"):
        verify_schedule("auto", str(tmp_path / "llama"), TP2, ranks=ranks, adapter="mine.py")


def test_what_one_side_alone_has_is_wrong_though_all_else_is_equal(monkeypatch, tmp_path):
    finding = Finding("backward", "decay", "it is not on both sides and", (0,), 1.0, "", "")

    class Compared:
        notes, facts = [], SimpleNamespace(records=())

        def __init__(self, *given):
            pass

        def judge(self):
            return [Check("gradients", 0.0, 1e-5)], "not on both sides: decay", finding

    monkeypatch.setattr("megasched.verify.verify.StepComparison", Compared)
    ranks = SimpleNamespace()
    found = verify_schedule("auto", save("gpt2", tmp_path), TP2, ranks=ranks)
    assert (found.verdict, found.right, found.finding) == ("wrong", False, finding)


ADAPTED = """
from megasched.model_adapters.default_schedule import schedule as auto


def schedule(sch, layout):
    auto(sch, layout)
    sch["**.*_proj"].adapt(rank=4, alpha=8, dropout=0.1)
    sch["model.norm"].unfreeze()
"""


def test_adapters_are_held_against_those_of_the_unscheduled_model(ranks, tmp_path):
    (tmp_path / "lora.py").write_text(ADAPTED)
    found = verify_schedule(str(tmp_path / "lora.py"), save("llama", tmp_path), TP2_SP, ranks=ranks)
    assert (found.verdict, found.why) == ("equal", "")
    worst = {check.name: check.worst for check in found.checks}
    assert ".lora_" in worst["gradients"]


# Where each mistake is to be found, in which pass, how the numbers relate, and a part of the cause.
PLANTED = {
    "dropped_forward_reduce": (
        *("llama", TP2, "forward", "model.layers.1.self_attn.o_proj"),
        *("the parts add up to the right value", "its forward all-reduce"),
    ),
    "dropped_backward_reduce": (
        *("llama", TP2, "backward", "model.layers.2.post_attention_layernorm.weight"),
        *("the parts add up to the right value", "(backward all-reduce) is missing before model.layers.2.mlp"),
    ),
    "bias_added_by_every_rank": (
        *("gpt2", TP2, "forward", "transformer.h.1.mlp.c_proj"),
        *("off by the same vector at every token", "a bias is added on every TP rank"),
    ),
    "norm_gradient_not_summed": (
        *("llama", TP2_SP, "backward", "model.layers.1.post_attention_layernorm.weight"),
        *("the parts add up to the right value", "with the attribute sequence_parallel"),
    ),
    "untied_tie": (
        *("gemma2", PP2, "backward", "model.embed_tokens.weight"),
        *("each copy of the tied tensor has a part", "the tie came apart"),
    ),
    "wrong_head_order": (
        *("phi3", TP2, "forward", "model.layers.0.self_attn.qkv_proj"),
        *("in another order", "heads (or packed projections)"),
    ),
    "forked_dropout": (
        *("gpt2", TP2, "forward", "transformer.h.1.mlp.dropout"),
        *("drop different places", "the RNG state that differs over TP"),
    ),
    "rotary_in_bf16": (
        *("llama", TP2, "forward", "model.rotary_emb"),
        *("rounded to bfloat16", "must stay in float32"),
    ),
    "multiplier_twice": (
        *("gemma2", PP2, "forward", "model.layers.2"),
        *("it is 8 times the right value", "applied once more at a stage"),
    ),
    "kv_head_of_another_group": (
        *("llama", TP2, "forward", "model.layers.1.self_attn.k_proj"),
        *("in another order", "another group"),
    ),
}
BY_THE_SCHEDULE = {"forked_dropout": "fork_rng()", "rotary_in_bf16": "hook(", "multiplier_twice": "hook("}


# The first is found in bf16 below; the other has heads in another order, as one before it.
TWINS = ("dropped_forward_reduce", "kv_head_of_another_group")


@pytest.mark.parametrize("fault", [case(one, fast=one not in TWINS) for one in PLANTED])
def test_a_planted_mistake_is_caught_and_located(ranks, tmp_path, fault):
    model_type, layout, direction, where, relation, cause = PLANTED[fault]
    found = verify_schedule(f"{FAULTS}:{fault}", save(model_type, tmp_path), layout, ranks=ranks)
    ranks.renew()
    assert found.verdict == "wrong"
    finding = found.finding
    assert isinstance(finding, Finding)
    assert (finding.direction, finding.where) == (direction, where)
    assert relation in finding.relation
    assert cause in finding.cause
    assert finding.ranks == {"multiplier_twice": (1,)}.get(fault, (0, 1))
    if fault in BY_THE_SCHEDULE:
        ((path, asked, source),) = finding.guilty  # without this one call all is right
        assert BY_THE_SCHEDULE[fault] in asked
        assert source.startswith("tests/verify/faults.py:") or source.startswith(f"{FAULTS}:")
        assert finding.records[0] == (path, asked, source)


def test_in_bf16_plain_hf_is_the_measure(ranks, tmp_path):
    found = verify_schedule("auto", save("llama", tmp_path), TP2_SP, bf16=True, ranks=ranks)
    assert (found.verdict, found.why) == ("equal", "")
    numbers = {check.name: check for check in found.checks}
    assert list(numbers) == ["loss", "logits", "gradients together", "each gradient", "gradient norm"]
    assert 2.0**-10 < numbers["logits"].error < numbers["logits"].tolerance < 2.0**-4


def test_in_bf16_buffers_are_those_of_a_model_in_bf16(ranks, tmp_path):
    """XGLM's positions; its code makes tensors of no dtype, too, which the exact result has in float64."""
    small_config("xglm").save_pretrained(tmp_path)
    found = verify_schedule("auto", str(tmp_path), TP2, bf16=True, ranks=ranks)
    assert (found.verdict, found.why) == ("equal", "")


def test_in_bf16_a_mistake_is_found_as_well(ranks, tmp_path):
    fault = f"{FAULTS}:dropped_forward_reduce"
    found = verify_schedule(fault, save("llama", tmp_path), TP2, bf16=True, ranks=ranks)
    ranks.renew()
    assert found.verdict == "wrong"
    assert (found.finding.direction, found.finding.where) == ("forward", "model.layers.1.self_attn.o_proj")
    ((path, asked, _),) = found.finding.guilty
    assert (path, "shard(" in asked) == ("model.layers.1.self_attn.o_proj", True)


def test_a_schedule_for_more_layers_is_refused_with_the_way_out(ranks, tmp_path):
    schedule = tmp_path / "deep.py"
    schedule.write_text("def schedule(sch, layout):\n    sch['model.layers.9.mlp'].checkpoint()\n")
    folder = save("llama", tmp_path, num_hidden_layers=10)
    found = verify_schedule(str(schedule), folder, ParallelDims(), ranks=ranks)
    assert found.verdict == "refused"
    assert found.why.startswith("the schedule has a problem:\n  - ")
    assert "model.layers.9.mlp" in found.why
    assert f"\n    asked for at: {schedule}:2" in found.why
    assert found.notes[-1] == "the copy has 4 layers; --layers gives it more"
    assert verify_schedule(str(schedule), folder, ParallelDims(), layers=10, ranks=ranks).verdict == "equal"


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ({"tensor_model_parallel_size": 3}, "remedy: a tensor parallel size that divides all of them: 1, 2"),
        ({"pipeline_model_parallel_size": 5}, "remedy: at most 4 stages"),
        ({"expert_model_parallel_size": 2, "data_parallel_size": 2}, "no experts"),
    ],
)
def test_a_layout_that_cannot_be_planned_starts_no_ranks(tmp_path, sizes, why):
    folder, no_ranks = save("llama", tmp_path), object()
    found = verify_schedule("auto", folder, ParallelDims(**sizes), layers=4, ranks=no_ranks)
    assert found.verdict == "refused"
    assert why in found.why


def test_a_refusal_that_more_layers_do_not_mend_does_not_name_them(ranks, tmp_path):
    (tmp_path / "typo.py").write_text("def schedule(sch, layout):\n    sch['model.layers.*.mpl'].checkpoint()\n")
    found = verify_schedule(str(tmp_path / "typo.py"), save("llama", tmp_path), ParallelDims(), ranks=ranks)
    assert (found.verdict, found.notes) == ("refused", [])


def test_a_job_too_large_for_one_machine_is_refused_at_once(tmp_path):
    with pytest.raises(ConfigError, match="takes 64 processes"):
        verify_schedule("auto", str(tmp_path), ParallelDims(data_parallel_size=64))


def test_at_full_size_the_weights_of_the_folder_are_taken(ranks, tmp_path):
    from megasched.definition.small_models.small_models import write_small_model

    write_small_model("llama", tmp_path)
    found = verify_schedule("auto", str(tmp_path), TP2, full_size=True, ranks=ranks)
    assert (found.verdict, found.small, found.model) == ("equal", False, "Llama")
