"""Schedule files: found by file, by name in a file, by registration; each failure names the line."""

import importlib.metadata
import textwrap

import pytest
from torch import nn

import megasched
from megasched import ConfigError, ParallelDims, ScheduleError
from megasched.definition.build import build_definition
from megasched.language import schedule_file
from megasched.language.schedule_file import add_options, apply_schedule, find_schedule, split_file
from tests import tiny


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(schedule_file, "_REGISTERED", {})


@pytest.fixture
def write(tmp_path):
    def make(text, name="mine.py"):
        file = tmp_path / name
        file.write_text(textwrap.dedent(text))
        return file

    return make


@pytest.fixture
def sch():
    return megasched.create_schedule(nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)), ParallelDims())


def problem_of(raised):
    (problem,) = raised.value.problems
    return problem


def test_a_file_is_run_on_the_schedule_with_its_layout(write, sch):
    file = write(
        """
        def schedule(sch, layout):
            sch["0"].annotate("weight", "tp", layout.tp)
        """
    )
    assert apply_schedule(sch, find_schedule(str(file))) is sch
    assert [(str(r), r.source) for r in sch.records] == [
        ("0: annotate(param='weight', key='tp', value=1)", f"{file}:3")
    ]


def test_several_in_one_file(write, sch):
    file = write(
        """
        import megasched

        def schedule(sch, layout):
            sch["0"].checkpoint()

        @megasched.register_schedule("rows")
        def by_rows(sch, layout):
            sch["2"].shard("weight", axis=1)

        def plain(sch, layout):
            sch["1"].fork_rng()
        """
    )
    for name in (str(file), f"{file}:rows", f"{file}:by_rows", f"{file}:plain", "rows"):
        apply_schedule(sch, find_schedule(name))
    assert [r.primitive for r in sch.records] == ["checkpoint", "shard", "shard", "fork_rng", "shard"]


def test_auto_shards_by_roles():
    from megasched.model_adapters.default_schedule import schedule

    assert find_schedule("auto") is schedule


def test_installed_packages_register_through_entry_points(monkeypatch, sch):
    point = importlib.metadata.EntryPoint("theirs", f"{__name__}:installed", "megasched.schedules")
    monkeypatch.setattr(
        schedule_file, "entry_points", lambda group: [point] if group == "megasched.schedules" else []
    )
    assert find_schedule("theirs") is installed
    with pytest.raises(ConfigError, match="registered: theirs; or `auto`"):
        find_schedule("others")


def installed(sch, layout):
    sch["0"].checkpoint()


def test_registered_twice():
    megasched.register_schedule("mine")(installed)
    megasched.register_schedule("mine")(installed)
    with pytest.raises(ConfigError, match=rf"'mine' is registered twice: {__file__}:\d+ and {__file__}:\d+"):
        megasched.register_schedule("mine")(lambda sch, layout: None)


def test_a_file_may_use_what_a_module_may(write, sch):
    """Dataclasses look their module up; annotations are what the file makes of them."""
    file = write(
        """
        from dataclasses import dataclass
        from typing import ClassVar

        @dataclass
        class Plan:
            kind: "ClassVar[int]" = 1
            axis: int = 0

        def schedule(sch, layout: dict):
            assert schedule.__annotations__["layout"] is dict
            sch["0"].shard("weight", axis=Plan().axis)
        """
    )
    apply_schedule(sch, find_schedule(str(file)))
    assert sch.records[0].arguments["axis"] == 0


@pytest.mark.parametrize("name", ["missing.py", "missing.py:rows"])
def test_no_such_file(tmp_path, name):
    with pytest.raises(ConfigError, match=r"--model-schedule .*missing\.py: no such file"):
        find_schedule(str(tmp_path / name))


def test_a_name_that_nobody_registered():
    with pytest.raises(ConfigError, match=r"--model-schedule mine: no such file .*ends in \.py.*registered: none"):
        find_schedule("mine")


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        ("x = 1", "", "does not define `def schedule\\(sch, layout\\)`"),
        ("schedule = 1", "", "does not define `def schedule"),
        (
            "def schedule(sch, layout): pass",
            ":rows",
            "does not define a schedule 'rows': register it with @megasched",
        ),
    ],
)
def test_a_file_without_the_schedule_asked_for(write, text, name, says):
    file = write(text)
    with pytest.raises(ConfigError, match=f"{file}: the schedule file {says}"):
        find_schedule(f"{file}{name}")


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("def schedule(sch, layout)\n    pass", 1, "the schedule file has a syntax error: expected ':'"),
        ("x = 1\n  y = 2", 2, "the schedule file has a syntax error: unexpected indent"),
        ("\nimport no_such_module", 2, "ModuleNotFoundError: No module named 'no_such_module'"),
        ("from megasched import no_such_name", 1, "ImportError: cannot import name 'no_such_name'"),
        ("x = 1\n\n1 / 0", 3, "the schedule file fails when it is imported: ZeroDivisionError: division by zero"),
        ("import json\n\njson.loads('{')", 3, "the schedule file fails when it is imported: JSONDecodeError"),
        ("import megasched\nmegasched.load_config('/nowhere')", 2, "ConfigError: --hf-model /nowhere"),
    ],
)
def test_a_file_that_fails_when_it_is_read_names_its_line(write, text, line, what):
    file = write(text)
    with pytest.raises(ScheduleError) as raised:
        find_schedule(str(file))
    problem = problem_of(raised)
    assert what in problem.what
    assert problem.source == f"{file}:{line}"


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "mine.py").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScheduleError, match=r"has a syntax error: .*null bytes") as raised:
        find_schedule(str(tmp_path / "mine.py"))
    assert problem_of(raised).source == f"{tmp_path / 'mine.py'}:1"


@pytest.mark.parametrize(
    ("body", "line", "what"),
    [
        ("raise ValueError('too wide')", 4, "the schedule raised ValueError: too wide"),
        ("helper(sch)", 2, "the schedule raised KeyError: 'gone'"),
        ("sch['0'].shard('weight')", 4, "missing a required argument: 'axis'"),
        ("sch['0'].shrad('weight', 0)", 4, "the schedule raised AttributeError: 'shrad' is no primitive"),
        ("sch['7'].checkpoint()", 4, "no module '7' in the model"),
        ("sch['*.linear'].checkpoint()", 4, "no module matches '*.linear' in the model"),
        ("sch.role('mlp.up').checkpoint()", 4, "no module has the role 'mlp.up'"),
    ],
)
def test_a_schedule_that_raises_names_its_line(write, sch, body, line, what):
    file = write(f"def helper(sch):\n    {{}}['gone']\ndef schedule(sch, layout):\n    {body}")
    with pytest.raises(ScheduleError) as raised:
        apply_schedule(sch, find_schedule(str(file)))
    problem = problem_of(raised)
    assert what in problem.what
    assert problem.source == f"{file}:{line}"


def test_a_schedule_of_another_signature_names_where_it_stands(write, sch):
    file = write("\ndef schedule(sch):\n    pass")
    with pytest.raises(ScheduleError, match="takes 1 positional argument but 2 were given") as raised:
        apply_schedule(sch, find_schedule(str(file)))
    assert problem_of(raised).source == f"{file}:2"


@pytest.mark.parametrize(
    ("body", "changed"),
    [
        ("sch['0'].mod.extra = 3", "0.extra"),
        ("sch.mod.more = type(sch['0'].mod)(8, 12)", "the model"),
        ("sch['0'].mod.weight.requires_grad_(False)", "0"),
        ("sch['0'].mod.register_forward_hook(print)", "0"),
        ("sch['0'].mod.forward = abs", "0.forward"),
        ("sch['0'].mod.__class__ = type('Mine', (type(sch['0'].mod),), {})", "0"),
    ],
)
def test_a_schedule_that_changes_the_model_itself_is_refused(write, sch, body, changed):
    """Slapo's ``sch.mod`` may be changed; here no call says so, and nothing compares it."""
    file = write(f"def schedule(sch, layout):\n    {body}")
    with pytest.raises(
        ScheduleError, match="the schedule changes the model itself, and no call says so"
    ) as raised:
        apply_schedule(sch, find_schedule(str(file)))
    problem = problem_of(raised)
    assert changed in problem.what
    assert problem.source == f"{file}:1"
    assert "a primitive (replace, hook, annotate, one of your own)" in problem.remedy


def test_a_schedule_that_changes_the_config_is_refused(write):
    file = write("def schedule(sch, layout):\n    sch.mod.config.rms_norm_eps = 0.5")
    model = build_definition(tiny.config("llama"))
    with pytest.raises(ScheduleError, match=r"no call says so: config\.rms_norm_eps"):
        apply_schedule(megasched.create_schedule(model), find_schedule(str(file)))


def test_a_callable_object_is_a_schedule_too(write, sch):
    file = write(
        """
        from functools import partial

        def by_axis(sch, layout, axis):
            sch["0"].shard("weight", axis=axis)
            if axis:
                raise ValueError("no")

        schedule = partial(by_axis, axis=0)
        wrong = partial(by_axis, axis=1)
        """
    )
    apply_schedule(sch, find_schedule(str(file)))
    assert sch.records[0].arguments["axis"] == 0
    with pytest.raises(ScheduleError, match="ValueError: no") as raised:
        apply_schedule(sch, find_schedule(f"{file}:wrong"))
    assert "by_axis" in problem_of(raised).source


# ---- options ----------------------------------------------------------------------------------------

WITH_OPTIONS = """
def schedule(sch, layout, ratio=0.5, level="leaf"):
    sch["0"].annotate("weight", "seen", [ratio, level])

def strict(sch, layout, count):
    sch["0"].annotate("weight", "count", count)

def anything(sch, layout, **options):
    sch["0"].annotate("weight", "options", sorted(options))
"""


def seen(sch, name):
    apply_schedule(sch, find_schedule(name))
    return sch.records[-1].arguments["value"]


def test_options_are_given_to_the_function(write, sch):
    file = write(WITH_OPTIONS)
    assert seen(sch, str(file)) == [0.5, "leaf"]
    assert seen(sch, f"{file}:ratio=0.25,level=block") == [0.25, "block"]
    assert seen(sch, f"{file}:schedule:ratio=1") == [1, "leaf"]
    assert seen(sch, f"{file}:strict:count=3") == 3
    assert seen(sch, f"{file}:anything:b=1,a=2") == ["a", "b"]


def test_an_option_that_the_function_lacks_is_refused_with_those_it_has(write):
    file = write(WITH_OPTIONS)
    with pytest.raises(ConfigError, match=r"no option ration; it takes ratio, level$"):
        find_schedule(f"{file}:ration=1")
    with pytest.raises(ConfigError, match="no option a; it takes none"):
        find_schedule("auto:a=1")
    with pytest.raises(ConfigError, match="'rest' is no option"):
        find_schedule(f"{file}:ratio=1,rest")


def test_a_missing_option_names_the_function(write, sch):
    file = write(WITH_OPTIONS)
    with pytest.raises(ScheduleError) as raised:
        apply_schedule(sch, find_schedule(f"{file}:strict"))
    assert "missing 1 required positional argument: 'count'" in problem_of(raised).what
    assert problem_of(raised).source == f"{file}:5"


def test_options_are_added_to_a_name():
    assert add_options("a.py", []) == "a.py"
    assert add_options("a.py", ["x=1", "y=b"]) == "a.py:x=1,y=b"
    assert add_options("a.py:name:x=1,z=0", ["x=2"]) == "a.py:name:x=2,z=0"
    for wrong in ("x", "=1", "x=1,y=2", "a b=1"):
        with pytest.raises(ConfigError, match="write KEY=VALUE"):
            add_options("a.py", [wrong])


@pytest.mark.parametrize("rest", ["", ":other", ":ratio=2", ":other:ratio=2"])
@pytest.mark.parametrize("folder", ["plain", "at:12:30", "run:lr=0.1", "x.py:y"])
def test_a_path_may_have_colons(tmp_path, sch, folder, rest):
    (tmp_path / folder).mkdir()
    file = tmp_path / folder / "my.py"
    file.write_text("def schedule(sch, layout, ratio=1): print(ratio)\nother = schedule\n")
    assert split_file(f"{file}{rest}") == (file, rest[1:])
    find_schedule(f"{file}{rest}")
    assert add_options(f"{file}{rest}", ["ratio=3"]) == f"{file}{':other' if 'other' in rest else ''}:ratio=3"


def test_of_a_missing_file_the_path_ends_at_the_first_suffix(tmp_path):
    file = tmp_path / "a:b" / "my.py"
    assert split_file(f"{file}:where=x.py") == (file, "where=x.py")
    with pytest.raises(ConfigError, match=f"{file}: no such file"):
        find_schedule(f"{file}:name")
    assert split_file("auto:level=block") == (None, "auto:level=block")
