"""How ``megasched show`` looks by pipeline stage."""

from dataclasses import replace

from tests.cli.pages import report_of
from tests.cli.test_report_view import line_of, printed


def below(text, *words):
    """The lines of one stage, without the tree's guides."""
    lines = text.splitlines()
    start = lines.index(line_of(text, *words))
    found = [lines[start]]
    for line in lines[start + 1 :]:
        if not line or line.startswith(("├── ", "└── ")):
            break
        found.append(line)
    return [line.strip("│├└─ ") for line in found]


def test_each_stage_says_where_it_is_and_what_it_holds(inspect):
    report = inspect(tp=2, pp=2, vp=2)
    text = printed(report)
    line_of(text, "LlamaForCausalLM  in 4 stages, layers balanced by cost")
    first = below(text, "stage 0  pp rank 0, chunk 0  layer 0")
    assert first[1] == f"{report.stages[0].parameters:,} parameters, 24.6 KiB; 24.6 % of the FLOPs"
    assert first[2].startswith("model.embed_tokens  Embedding → VocabParallelEmbedding")
    assert "output: all_reduce forward" in first
    assert "model.layers.0  LlamaDecoderLayer" in first
    assert not any("lm_head" in line or "model.norm" in line for line in first)


def test_equal_stages_are_one_line_and_equal_layers_are_told_once(inspect):
    text = printed(inspect(tp=2, pp=2, vp=2))
    middle = below(text, "stages 1-2", "×2", "layers 1-2, 1 each, as layers.0")
    assert len(middle) == 2
    assert middle[1].startswith("4,416 parameters, 8.62 KiB;")
    last = below(text, "stage 3  pp rank 1, chunk 1  layer 3")
    assert last[2] == "model.layers.3  as layers.0"
    assert last[3].startswith("model.norm  LlamaRMSNorm, whole")
    assert last[4].startswith("lm_head  Linear → ColumnParallelLinear")
    assert text.count("q_proj  Linear") == 1


def test_ranks_of_equal_stages_without_chunks(inspect):
    text = printed(inspect(pp=4))
    line_of(text, "stages 1-2  ×2  pp ranks 1-2  layers 1-2, 1 each, as layers.0")
    assert "chunk" not in text


def test_a_stage_ends_where_the_schedule_cuts(inspect):
    text = printed(inspect('sch["model.layers.2"].cut_pipeline_stage()', tp=2, pp=2))
    line_of(text, "in 2 stages, cut by the schedule")
    assert below(text, "stage 0  pp rank 0  layers 0-2")[1].endswith("; ends at mysched.py:11")
    assert "ends at" not in " ".join(below(text, "stage 1  pp rank 1  layer 3"))


def test_other_layers_on_a_later_stage_are_told_there(inspect):
    text = printed(inspect('sch["model.layers.2"].checkpoint()', tp=2, pp=4))
    found = below(text, "stage 2  pp rank 2  layer 2")
    assert found[2].startswith("model.layers.2  LlamaDecoderLayer  mysched.py:11")
    assert found[3:] == ["recomputed in the backward pass", "inside as layers.0"]


def test_layers_of_two_kinds_on_equal_stages(inspect):
    more = ["num_hidden_layers=8"]
    text = printed(inspect('sch["model.layers"][::2].checkpoint()', tp=2, pp=4, overrides=more))
    found = below(text, "stages 1-2  ×2  pp ranks 1-2  layers 2-5, 2 each")
    assert found[2:] == ["1 each as layers.0", "1 each as layers.1"]


def test_sequence_parallelism_is_told_at_the_first_layers(inspect):
    text = printed(inspect(tp=2, sp=True, pp=2))
    assert "hidden state cut along the sequence at layers.0 (backward all_gather)" in below(text, "stage 0")
    line_of(text, "whole again after layers.3")


def test_a_tie_is_told_on_both_stages(inspect):
    text = printed(inspect(tp=2, pp=2, overrides=["tie_word_embeddings=true"]))
    for stage in ("stage 0", "stage 1"):
        assert "tied across stages: gradient summed over the embedding group" in below(text, stage)


def test_chunks_of_a_rank_are_summed(inspect):
    report = inspect(tp=2, pp=2, vp=2)
    for rank, layers in ((0, "0, 2"), (1, "1, 3")):
        total = sum(stage.parameters for stage in report.stages if stage.pp_rank == rank)
        assert line_of(printed(report), f"      {rank}  {layers}  ", f"{total:,}").split()[-1] == "%"


def test_many_layers_on_many_chunks_are_one_screen(llama):
    from megasched.cli.show.report import inspect_schedule
    from megasched.language.parallel_dims import ParallelDims

    layout = ParallelDims(
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        pipeline_model_parallel_size=8,
        virtual_pipeline_model_parallel_size=5,
    )
    lines = printed(inspect_schedule("auto", llama, layout, overrides=["num_hidden_layers=80"])).splitlines()
    assert len(lines) < 70
    assert max(map(len, lines)) <= 100


def test_a_stage_without_layers():
    report = report_of(2, 1)
    empty = [replace(report.stages[0], stop=2), replace(report.stages[1], start=2)]
    modules = [replace(module, stages=(0,)) for module in report.modules]
    line_of(printed(replace(report, stages=empty, modules=modules)), "stage 1  pp rank 1  no layers")
