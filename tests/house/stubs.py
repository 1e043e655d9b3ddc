"""The types of the primitives, as they are called on a schedule: a stub, written from the registry.

    python -m tests.house.stubs

writes ``megasched/language/primitive_calls.pyi`` (``make stubs``). Third parties' are not in it: to a type
checker a call of one returns anything.
"""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import megasched
from megasched.language import registry
from megasched.language.registry import Primitive

STUB = Path(megasched.__file__).parent / "language" / "primitive_calls.pyi"
_HEAD = '"""Written by `make stubs`, from the registry: primitives as called on schedules and lists of them."""'


def stub() -> str:
    """The whole file."""
    every = [registry.get_primitive(name) for name in registry.list_primitives(name_only=True)]
    built_in = [primitive for primitive in every if type(primitive).__module__.startswith("megasched.")]
    imports = {line for primitive in built_in for line in _imports(primitive)}
    methods = [line for primitive in built_in for line in _methods(primitive)]
    text = "\n".join([_HEAD, "from typing import Self", *sorted(imports), "class PrimitiveCalls:", *methods])
    return _ruff(_ruff(text, "check", "--select", "I", "--fix", "--quiet"), "format")


def _signature(primitive: Primitive) -> inspect.Signature:
    """Of ``record``, without the node."""
    signature = inspect.signature(primitive.record)
    returned = "Self" if primitive.leaves_record else signature.return_annotation
    given = [p for name, p in signature.parameters.items() if name != "node"]
    return signature.replace(parameters=given, return_annotation=returned)


def _methods(primitive: Primitive) -> Iterator[str]:
    signature = _signature(primitive)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    text = str(signature.replace(parameters=[itself, *signature.parameters.values()]))
    for annotation in _annotations(signature):  # which are text, and so in quotes
        text = text.replace(repr(annotation), annotation)
    for name in (primitive.name, *primitive.aliases):
        yield f"    def {name}{text}: ..."


def _annotations(signature: inspect.Signature) -> list[str]:
    return [*(p.annotation for p in signature.parameters.values()), signature.return_annotation]


def _imports(primitive: Primitive) -> Iterator[str]:
    """The lines that bind the names of its annotations in the module that it is defined in."""
    annotations = _annotations(_signature(primitive))
    used = {n.id for text in annotations for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}
    module = ast.parse(inspect.getsource(sys.modules[type(primitive).__module__]))
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (f"import {alias.name}" for alias in node.names if alias.name in used)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"from {node.module} import {alias.name}" for alias in node.names if alias.name in used)


def _ruff(text: str, *command: str) -> str:
    program = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(STUB), "-"]
    return subprocess.run(program, input=text, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    STUB.write_text(stub())
    print(f"written: {STUB}")
