"""What others have written is read by ``megasched/reading`` alone: it knows what may lie in a file's place."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("megasched", "launch", "model_adapters", "patches")
READERS = ROOT / "megasched" / "reading"
# Calls that read a file or what stood in one, by the name of what is called.
READING = {
    *("json.load", "json.loads", "tomllib.load", "tomllib.loads", "safe_open"),
    *("pickle.load", "pickle.loads", "numpy.load", "numpy.fromfile", "numpy.memmap", "np.load", "np.fromfile"),
    *("read_text", "read_bytes"),
}
# What processes of one run hand each other through pipes and folders of their own, what Megatron opens, and the
# code of classes that were imported.
NO_FILES_OF_OTHERS = {
    ("megasched/trainer/evidence/certificate.py", "read_bytes"),
    *(("megasched/verify/plain/reference.py", call) for call in ("json.loads", "read_text")),
    *(("megasched/verify/plain/runs.py", call) for call in ("json.loads", "read_text")),
    ("launch/torchrun/nodes.py", "open"),
    ("megasched/trainer/checkpoint/one_writer.py", "open"),
    ("megasched/verify/library/verify_module.py", "pickle.loads"),
    ("patches/results_queue.py", "pickle.loads"),
    ("megasched/verify/ranks/pool.py", "pickle.loads"),
    ("megasched/verify/ranks/worker.py", "pickle.loads"),
}


def reading_calls(source: str) -> list[tuple[int, str]]:
    """Lines and names of the calls in a module that read files."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        method = name.rpartition(".")[2] if isinstance(node.func, ast.Attribute) else ""
        if name in READING - {"read_text", "read_bytes"} or method in READING:
            found.append((node.lineno, name if name in READING else method))
        elif (name == "open" or method == "open") and _reads(node, name):
            found.append((node.lineno, "open"))
    return found


def _reads(call: ast.Call, name: str) -> bool:
    """Whether an ``open``, of whatever, is for reading: it says no mode of writing."""
    words = [
        word.value for word in (*call.args, *(k.value for k in call.keywords)) if isinstance(word, ast.Constant)
    ]
    return name != "os.open" and not any(isinstance(word, str) and set(word) & set("wax+") for word in words)


def test_the_search_knows_a_call_that_reads():
    source = "json.loads(a)\nPath(a).read_text()\nopen(a)\npath.open('rb')\npath.open('w')\nread_text(a, b)\n"
    assert [line for line, _ in reading_calls(source)] == [1, 2, 3, 4]


@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_but_the_readers_opens_a_file_to_read(folder):
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if READERS not in path.parents:
            calls = reading_calls(path.read_text())
            found += [f"{name}:{line}: {call}" for line, call in calls if (name, call) not in NO_FILES_OF_OTHERS]
    assert found == []
