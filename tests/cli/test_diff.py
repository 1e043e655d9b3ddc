"""What ``megasched show --diff`` tells of two schedules."""

from dataclasses import replace

from rich.console import Console

from megasched.cli.output import report_console
from megasched.cli.page.compare import StepComparison, print_comparison
from megasched.cli.show.diff import Change, compare_reports, print_diff
from megasched.cli.show.report_view import print_report
from megasched.planner.hardware.hardware import load_hardware
from megasched.planner.pipeline import Chunk
from tests.cli.pages import page_of, predicted


def test_schedules_that_do_the_same_differ_in_nothing(inspect):
    diff = compare_reports(inspect(tp=2, sp=True), inspect(tp=2, sp=True, schedule="auto"))
    assert (diff.calls_of_first, diff.calls_of_second, diff.same) == ((), (), True)


def test_calls_that_only_one_makes_are_folded_over_layers(inspect):
    more = inspect(
        'sch["model.layers.*.mlp"].checkpoint()', 'sch["model.layers.2"].cut_pipeline_stage()', tp=2, pp=2
    )
    diff = compare_reports(inspect(tp=2, pp=2), more)
    assert diff.calls_of_first == ()
    assert diff.calls_of_second == (
        "model.layers.0-3.mlp: checkpoint()",
        "model.layers.2: cut_pipeline_stage()",
    )
    assert diff.changes == (Change("model.layers.0-3.mlp", "recompute", "", "yes"),)
    assert diff.stages == (
        Change("stage 0", "layers", "0-1", "0-2"),
        Change("stage 1", "layers", "2-3", "3-3"),
    )
    back = compare_reports(more, inspect(tp=2, pp=2))
    assert back.calls_of_first == diff.calls_of_second
    assert back.changes == (Change("model.layers.0-3.mlp", "recompute", "yes", ""),)


def test_a_module_that_is_not_cut_is_told_with_what_it_sends_and_holds(inspect, tmp_path):
    path = tmp_path / "whole.py"
    path.write_text(
        "from megasched.model_adapters.default_schedule import schedule as auto\n\n\n"
        "def schedule(sch, layout):\n    auto(sch, layout)\n"
        "    sch.records[:] = [r for r in sch.records if r.path != 'lm_head']\n"
    )
    diff = compare_reports(inspect(tp=2), inspect(tp=2, schedule=str(path)))
    assert diff.calls_of_first == ("lm_head: shard(param='weight', axis=0)",)
    changed = {(change.paths, change.what): (change.first, change.second) for change in diff.changes}
    assert changed["lm_head", "weight on a rank"] == ("[256, 32]", "[300, 32]")
    assert changed["lm_head", "sends"][1] == ""


def test_the_page_shows_signs_and_fits_100_columns(inspect, capsys):
    more = inspect('sch["model.layers.1.mlp"].checkpoint()', tp=2)
    print_diff(compare_reports(inspect(tp=2), more), Console(width=100))
    lines = capsys.readouterr().out.splitlines()
    assert "  + model.layers.1.mlp: checkpoint()" in lines
    at = lines.index("  model.layers.1.mlp  recompute")
    assert lines[at + 1 : at + 3] == ["    - nothing", "    + yes"]
    assert max(map(len, lines)) <= 100


def test_the_steps_of_both_follow_and_say_what_is_not_known(inspect, capsys):
    """Two stages of as many FLOPs and 8 micro-batches: 8 of 9 are work, 4 of 5 with half of them."""
    steps = StepComparison(("one", "other"), (page_of(2, 1, 8), page_of(2, 1, 4)), 8)
    diff = replace(compare_reports(inspect(tp=2), inspect(tp=2, schedule="auto")), steps=steps)
    print_diff(diff, Console(width=100))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[lines.index("one other difference") + 1 :] == [
        "GPUs 4 4 same",
        "Micro-batches in a step 8 4 -4",
        "Step time not known not known",
        "Pipeline bubble 11.1% 20.0% +8.9 points",
        "Tokens/s per GPU not known not known",
        "Peak memory of a GPU not known not known",
        "Sent over PP, send 128.0 KiB 64.0 KiB -64.0 KiB (-50.0%)",
        "",
        "step time and tokens/s are not known: name the hardware with --gpu",
        "what is sent in a step: over DP by the largest pipeline rank, else by all stages of one replica",
    ]
    assert diff.to_dict()["steps"]["figures"][0] == {
        **{"name": "GPUs", "unit": "count", "first": 4, "second": 4},
        "difference": 0,
    }


def test_brackets_of_names_are_no_markup(capsys):
    hardware = replace(load_hardware("h100-80gb"), name="H100 [/rack] [big]")
    page = page_of(1, 1, 4, prediction=predicted([[Chunk(1.0, 2.0)]]), hardware=hardware)
    print_comparison(StepComparison(("run[/old].py", "s[new].py"), (page, page), 4), report_console())
    print_report(page.report, report_console())
    told = capsys.readouterr().out
    assert "run[/old].py  s[new].py" in told
    assert "predicted on H100 [/rack] [big]: step" in told


def test_a_layout_that_can_not_be_predicted_or_does_not_fit_is_told():
    h100 = load_hardware("h100-80gb")
    small = replace(h100, memory_gib=h100.reserved_gib + 1)
    full = page_of(2, 1, 4, prediction=predicted([[Chunk(1.0, 2.0)]] * 2), hardware=small)
    unknown = page_of(2, 1, 4, why_not="it computes by values", hardware=small)
    comparison = StepComparison(("one", "other"), (full, unknown), 4)
    assert comparison.notes[:2] == [
        "one does not fit into the memory of a GPU",
        "other is not predicted: it computes by values",
    ]
    bubble = comparison.figures[3]
    assert (bubble.name, bubble.first, bubble.second, bubble.difference) == ("Pipeline bubble", 0.25, None, None)
