"""An architecture is one file: families have one form, and nothing else in the product goes by a model type."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from tests.house import survey

FAMILIES = "model_adapters/families/"
FILES = [path for path in survey.sources() if path.startswith(FAMILIES) and not path.endswith("__init__.py")]
# Files that name model types -> why.
NAMING = {
    "megasched/definition/small_models/config_overrides.py": "fields that HF's own config classes want together; "
    "the floor of definitions is below adapters, and most of these types have none",
    "megasched/trainer/evidence/compatibility.py": "which have been checked under another objective: evidence, "
    "by which nothing is decided",
}


def statements(path):
    """Those of a family's file after its docstring and imports."""
    tree = survey.sources()[path]
    assert ast.get_docstring(tree), path
    return [node for node in tree.body[1:] if not isinstance(node, ast.Import | ast.ImportFrom)]


@pytest.mark.parametrize("path", FILES)
def test_families_have_one_form(path):
    """A docstring, imports, what the adapter is made of, and one ADAPTER, which ends the file."""
    *made_of, adapter = statements(path)
    assert ast.unparse(adapter).startswith(("ADAPTER = Adapter(", "ADAPTER = [Adapter("))
    for node in made_of:
        assert isinstance(node, ast.FunctionDef) or (isinstance(node, ast.Assign) and node.targets[0].id.isupper())
    assert not any(isinstance(node, ast.If | ast.IfExp | ast.Match) for node in ast.walk(survey.sources()[path]))
    assert len((survey.ROOT / path).read_text().splitlines()) <= 40


def test_a_model_type_is_of_one_family():
    named = [
        constant.value
        for path in FILES
        for node in ast.walk(survey.sources()[path])
        if isinstance(node, ast.keyword) and node.arg == "model_types"
        for constant in node.value.elts
    ]
    assert [name for name, count in Counter(named).items() if count > 1] == []
    assert len(named) > 80


def names_a_type(node, types):
    """Whether a comparison, or a table, has a model type in it."""
    if isinstance(node, ast.Compare):
        candidates = [node.left, *node.comparators]
    elif isinstance(node, ast.Dict):
        candidates = node.keys
    else:
        candidates = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else []
    return any(isinstance(one, ast.Constant) and one.value in types for one in candidates)


def test_nothing_else_goes_by_a_model_type():
    """No ``if`` on one, and no table."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    types = CONFIG_MAPPING_NAMES.keys() - {"clip"}  # a word of gradients, too
    found = {
        path
        for path, tree in survey.sources().items()
        if not path.startswith(FAMILIES) and any(names_a_type(node, types) for node in ast.walk(tree))
    }
    assert found == NAMING.keys()
