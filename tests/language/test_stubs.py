"""What type checkers are told of the primitives is what the registry has."""

from __future__ import annotations

import ast

from megasched.language.registry import list_primitives
from tests.house.stubs import STUB, stub

ALIASES = {"pipeline_split", "find_subgraph", "print"}
FINDING = ("find", "find_node", "find_subgraph")


def test_the_stub_is_that_of_the_registry():
    assert STUB.read_text() == stub(), "a primitive has changed: run `make stubs`"


def test_every_primitive_is_a_method_and_may_be_called_on_lists():
    (calls,) = [node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.ClassDef)]
    returned = {node.name: ast.unparse(node.returns) for node in calls.body}
    assert set(list_primitives(name_only=True)) == returned.keys() - ALIASES
    assert returned == {**dict.fromkeys(returned, "Self"), **dict.fromkeys(FINDING, "list[Subgraph]")}
