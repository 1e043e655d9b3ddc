"""How ``megasched show`` looks."""

from io import StringIO

import pytest
from rich.console import Console

from megasched.cli.output import format_bytes, format_count
from megasched.cli.show.report_view import print_report
from megasched.printing.shell_command import shell_command


def printed(report):
    console = Console(width=100, file=StringIO(), highlight=False, markup=False)
    print_report(report, console)
    return console.file.getvalue()


def line_of(text, *words):
    found = [line for line in text.splitlines() if all(word in line for word in words)]
    assert len(found) == 1, (words, found)
    return found[0]


def test_layers_are_folded_and_sources_named(inspect):
    text = printed(inspect(tp=2))
    assert "LlamaForCausalLM" in text.splitlines()[0]
    assert "TP2" in text.splitlines()[0]
    line_of(text, "layers.0-3", "×4", "LlamaDecoderLayer")
    line = line_of(text, "q_proj  Linear → ColumnParallelLinear")
    assert line.endswith("q_proj  Linear → ColumnParallelLinear  weight [32, 32] → [16, 32]  mysched.py:5")
    line_of(text, "input: all_reduce backward (once for gate_proj, up_proj)")
    assert text.count("weight [8, 32] → [4, 32]") == 2


def test_what_one_rank_holds_without_a_pipeline(inspect):
    report = inspect(tp=2)
    text = printed(report)
    (stage,) = report.stages
    line_of(text, f"on one rank: {stage.parameters:,} parameters, {format_bytes(2 * stage.parameters)} at 16 bits")
    assert "stage" not in text


def test_a_recomputed_half_is_told_once(inspect):
    text = printed(inspect('sch["model.layers"][::2].checkpoint()', tp=2))
    line_of(text, "layers.0,2", "×2")
    line_of(text, "layers.1,3", "×2")
    line_of(text, "inside as layers.0,2")
    line_of(text, "recomputed in the backward pass")


def test_sequence_parallelism(inspect):
    text = printed(inspect(tp=2, sp=True))
    line_of(text, "hidden state cut along the sequence at layers.0")
    line_of(text, "whole again after layers.3")
    assert text.count("weight [32], gradient partial, summed over TP") == 2


def test_what_is_sent_is_summed_up(inspect):
    """Over TP: sums of the embedding, of two rows in each of four layers and of the loss, and of gradients."""
    rows = [
        line.split() for line in printed(inspect(tp=2, sequence_length=16)).splitlines() if line.startswith("TP")
    ]
    assert rows == [
        ["TP", "all_reduce", "forward", "12", "9.19", "KiB"],
        ["TP", "all_reduce", "backward", "9", "9.00", "KiB"],
    ]


def test_lines_fit_into_100_columns(inspect):
    for text in (printed(inspect(tp=4, sp=True, pp=2)), printed(inspect())):
        assert max(len(line.rstrip()) for line in text.splitlines()) <= 100


@pytest.mark.parametrize(
    ("count", "text"),
    [(999_999, "999,999"), (1_500_000, "1.50 M"), (124_400_000, "124.4 M"), (8_030_000_000, "8.03 B")],
)
def test_counts(count, text):
    assert format_count(count) == text


def test_what_no_check_covers_is_told(inspect, monkeypatch):
    for known, told in (({"llama": {"tp2": {"verdict": "equal", "why": ""}}}, False), ({}, True)):
        monkeypatch.setattr("megasched.cli.show.report.load_matrix", lambda known=known: {"types": known})
        text = " ".join(printed(inspect(tp=2)).split())
        assert ("a run would need --allow-unverified: model type 'llama' has not been checked" in text) == told


def test_options_that_were_not_checked_are_told_with_the_command_that_checks_them(llama, inspect):
    assert "not checked with" not in printed(inspect(tp=4, schedule="auto"))
    text = printed(inspect(tp=4, sp=True, schedule="auto", overrides=["attention_bias=true"]))
    command = shell_command("verify", "--model-schedule", "auto", "--hf-model", llama)
    command += " --tensor-model-parallel-size 2 --sequence-parallel"
    told = "its class was not checked with these options: attention_bias=True; this checks it: "
    assert f"{told}`{command} --hf-override attention_bias=true`" in " ".join(text.split())
