"""Private names of transformers: the table has what the product uses, and the installed transformers has it."""

from __future__ import annotations

import ast
from importlib.metadata import version

import pytest

from megasched import transformers_names
from megasched.transformers_names import NAMES, missing_names, private_names
from tests.house import private_names as source
from tests.house import survey

# Files that may repeat a name which another has.
APART = {"megasched/verify/plain/loading.py": "its process must not import megasched"}
FOUND = {name.name: name for name in private_names()}


@pytest.fixture(scope="module")
def uses():
    return source.uses()


def test_a_private_name_is_in_the_table(uses):
    new = {name: sites for name, sites in uses.items() if not source.rows_of(name)}
    assert not new, "use a public name, or give a reason in megasched/transformers_names.py"


def test_the_table_has_nothing_else(uses):
    stale = sorted(NAMES.keys() - {row for name in uses for row in source.rows_of(name)})
    assert not stale, "no longer used: take it off megasched/transformers_names.py"


def test_a_name_stands_in_one_file(uses):
    files = {name: {site.partition(":")[0] for site in sites} - APART.keys() for name, sites in uses.items()}
    assert {name: paths for name, paths in files.items() if len(paths) > 1} == {}


def test_they_are_few():
    assert len(NAMES) <= 34


@pytest.mark.parametrize("name", NAMES)
def test_the_installed_transformers_has_it(name):
    assert FOUND[name].found, f"transformers {version('transformers')} has moved: {name}, which {NAMES[name]}"


@pytest.mark.parametrize(
    "name",
    [
        "transformers.gone",
        "transformers.gone:anything",
        "transformers.masking_utils:gone",
        "transformers.modeling_utils:Gone.post_init",
        "transformers.modeling_utils:PreTrainedModel.gone",
        "transformers.modeling_utils:PreTrainedModel.AttentionInterface",
    ],
)
def test_a_name_that_is_gone_is_missing(monkeypatch, name):
    monkeypatch.setattr(transformers_names, "NAMES", {name: "is gone", "transformers.modeling_utils": "is there"})
    assert [one.name for one in missing_names()] == [name]


def test_without_transformers_all_are_missing(monkeypatch):
    monkeypatch.setattr(transformers_names, "find_spec", lambda name: None)
    assert [one.name for one in missing_names()] == list(NAMES)


# of the survey itself -------------------------------------------------------------------------------


@pytest.fixture
def seen(monkeypatch):
    """Returns what is seen in a source, without its lines."""

    def look(text):
        monkeypatch.setattr(survey, "sources", lambda: {"megasched/a.py": ast.parse(text)})
        source._not_theirs.cache_clear()
        return sorted(source.uses())

    yield look
    monkeypatch.undo()
    source._not_theirs.cache_clear()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from transformers.masking_utils import sdpa_mask", ["transformers.masking_utils:sdpa_mask"]),
        (
            "from transformers.modeling_utils import PreTrainedModel",
            ["transformers.modeling_utils:PreTrainedModel"],
        ),
        ("from transformers import masking_utils", ["transformers:masking_utils"]),
        ("import transformers.masking_utils", ["transformers.masking_utils"]),
        ("x = transformers.masking_utils", ["transformers:masking_utils"]),
        ("x = 'transformers.masking_utils:sdpa_mask'", ["transformers.masking_utils:sdpa_mask"]),
        ("def f(model):\n    return model._tied_weights_keys", ["_tied_weights_keys"]),
        ("def f(model):\n    return getattr(model, '_tied_weights_keys')", ["_tied_weights_keys"]),
        ("def f(model):\n    model._never_heard_of = 1", ["_never_heard_of"]),
        ("class A:\n    def _init_weights(self, model):\n        model._init_weights()", ["_init_weights"]),
        ("from transformers import PreTrainedModel, logging", []),
        ("import transformers\nx = transformers.AutoConfig, transformers.logging", []),
        ("class A:\n    def __init__(self, other):\n        self._mine = other._mine", []),
        ("def f(module):\n    return module._parameters, '_never_heard_of'", []),
    ],
)
def test_what_is_seen_in_a_source(seen, text, found):
    assert seen(text) == found
