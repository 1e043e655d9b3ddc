"""What ``megasched show --diff`` tells of two schedules."""

from rich.console import Console

from megasched.cli.show.diff import Change, compare_reports, print_diff


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
