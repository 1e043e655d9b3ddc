"""The house keeps its floors: what is against its rules today is written down, and that list may only shrink."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points

import pytest

from tests.house import survey
from tests.house.floors import ALLOWED, FLOOR_OF, LATE, floor_of
from tests.house.ratchet import recorded


@pytest.mark.parametrize("rule", survey.SURVEYS)
def test_nothing_new_is_against_a_rule(rule):
    new = sorted(set(survey.SURVEYS[rule]()) - set(recorded()[rule]))
    assert not new, (
        f"against the rule {rule!r} (tests/house/survey.py); what floors may import: tests/house/floors.py"
    )


@pytest.mark.parametrize("rule", survey.SURVEYS)
def test_what_was_mended_is_off_the_list(rule):
    gone = sorted(set(recorded()[rule]) - set(survey.SURVEYS[rule]()))
    assert not gone, "mended: take it off the list, by `python -m tests.house.ratchet`"


def test_a_reason_stands_for_an_import_that_is_there():
    assert not set(LATE) - survey.imported_late(), "take it off LATE (tests/house/floors.py)"


def test_every_file_is_on_a_floor():
    assert {floor_of(path) for path in survey.sources()} == set(ALLOWED)
    assert all(any(path.startswith(prefix) for path in survey.sources()) for prefix in FLOOR_OF)


def test_floors_are_in_no_circle():
    done: set[str] = set()
    for floor, below in ALLOWED.items():
        done.add(floor)
        assert set(below.split()) <= set(ALLOWED), floor
    left = {floor: set(below.split()) for floor, below in ALLOWED.items()}
    while ready := [floor for floor, below in left.items() if below.isdisjoint(left)]:
        for floor in ready:
            del left[floor]
    assert not left


def test_the_product_does_not_grow():
    """What a feature needs is added to the number in the commit that brings the feature, with its reason."""
    assert survey.lines() <= recorded()["lines"]


def test_one_file_makes_the_consoles():
    """What it makes prints names of users as they are; rich's own would read ``[x]`` and ``:x:`` in them."""
    made = {
        path
        for path, tree in survey.sources().items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("Console", "from_markup")))
        or (isinstance(node, ast.ImportFrom) and node.module == "rich.markup")
    }
    assert made == {"megasched/printing/console.py"}


def modules_after(code):
    """Tops of the modules that are loaded after some lines of code."""
    program = f"import sys\n{code}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_the_installed_entry_points_are_those_of_this_tree():
    """Primitives, lowerings and compilers are found by them, so that an older installation lacks some."""
    wanted = tomllib.loads((survey.ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    installed = {group: {point.name: point.value for point in entry_points(group=group)} for group in wanted}
    missing = {group: points for group, points in wanted.items() if not points.items() <= installed[group].items()}
    again = "`pip install --no-deps --editable .`, and no megasched.egg-info of an earlier build"
    assert not missing, f"install megasched again: {again}"


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import megasched, megasched.errors", ["torch", "transformers", "megatron"]),
        ("import megasched.plan.plan, megasched.plan.make", ["megatron", "transformer_engine"]),
        (
            "import megasched.analysis.find_layer_stack, megasched.analysis.tp.facts",
            ["megatron", "transformer_engine"],
        ),
    ],
)
def test_floors_are_light(code, heavy):
    assert modules_after(code).isdisjoint(heavy)


# of the survey itself -------------------------------------------------------------------------------


@pytest.fixture
def house(tmp_path, monkeypatch):
    """Makes a house of these files."""

    def build(files):
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        monkeypatch.setattr(survey, "ROOT", tmp_path)
        for cached in (survey.sources, survey.arrows, survey._paths):
            cached.cache_clear()

    yield build
    monkeypatch.undo()
    for cached in (survey.sources, survey.arrows, survey._paths):
        cached.cache_clear()


def test_an_import_that_points_upwards_is_seen_wherever_it_stands(house):
    body = "def f():\n    from megasched.verify import verify\n"
    house(
        {
            "megasched/analysis/dims.py": body,
            "megasched/verify/verify.py": "import megasched.analysis.dims\n",
        }
    )
    (found,) = survey.upward()
    assert found == "megasched/analysis/dims.py (analysis) -> megasched/verify/verify.py (verify)"
    assert survey.late() == ["megasched/analysis/dims.py: megasched/verify/verify.py"]
    assert survey.circles() == ["megasched/analysis/dims.py", "megasched/verify/verify.py"]


def test_a_circle_of_three_is_seen_and_a_chain_is_none(house):
    house(
        {
            "megasched/analysis/a.py": "from megasched.analysis import b\n",
            "megasched/analysis/b.py": "from megasched.analysis.c import x\n",
            "megasched/analysis/c.py": "import megasched.analysis.a\nx = 1\n",
            "megasched/analysis/d.py": "import megasched.analysis.a\n",
        }
    )
    assert survey.circles() == [f"megasched/analysis/{name}.py" for name in "abc"]
    assert survey.upward() == []


def test_sizes_and_names_are_seen(house):
    long = "def f():\n" + "    x = 1\n" * 60
    house(
        {
            "megasched/analysis/long.py": long * 7,
            "megasched/analysis/words.py": "class Part:\n    def of_sides(self): ...\n    def _slot(self): ...\n",
            "megasched/graph/words.py": "class Part: ...\nimport megatron.core\n",
            **{f"launch/f{number}.py": "x = 1\n" for number in range(15)},
        }
    )
    assert survey.long_files() == ["megasched/analysis/long.py"]
    assert set(survey.long_functions()) == {"megasched/analysis/long.py: f"}
    assert survey.full_folders() == ["launch"]
    assert survey.shared_names() == ["Part: megasched/analysis/words.py, megasched/graph/words.py"]
    words = [
        "megasched/analysis/words.py: Part",
        "megasched/analysis/words.py: of_sides",
        "megasched/graph/words.py: Part",
    ]
    assert survey.forbidden_words() == words
    assert survey.megatron() == ["megasched/graph/words.py (graph) imports megatron"]
    assert survey.lines() == 61 * 7 + 3 + 2 + 15
