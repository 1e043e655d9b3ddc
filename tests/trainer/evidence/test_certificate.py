"""What a certificate speaks for, and what is said where it does not."""

import hashlib
import importlib.util
import json
import linecache
import sys
from importlib.metadata import EntryPoint, version
from types import SimpleNamespace

import pytest
from torch import nn
from transformers import LlamaConfig

from megasched.errors import ConfigError
from megasched.language import schedule_file
from megasched.language.parallel_dims import ParallelDims
from megasched.trainer.evidence.certificate import (
    read_certificate,
    require_certificate,
    subject_of,
    write_certificate,
)
from megasched.verify.verify import certify
from tests import tiny

HEAD = """
from torch import nn


def half(x):
    return x / 2


class Norm(nn.Module):
    def forward(self, x):
        return half(x)
"""
SMALL = ParallelDims(tensor_model_parallel_size=2, sequence_parallel=True, pipeline_model_parallel_size=2)
LARGE = ParallelDims(tensor_model_parallel_size=8, sequence_parallel=True, pipeline_model_parallel_size=16)


@pytest.fixture
def schedule(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def schedule(sch, layout): ...\n")
    return str(file)


def definition(config=None, *modules):
    """What a certificate asks of one."""
    return SimpleNamespace(config=config or LlamaConfig(), modules=lambda: (nn.Linear(1, 1), *modules))


def certified(tmp_path, schedule, layout=SMALL, verdict="equal"):
    path = tmp_path / "certificate.json"
    write_certificate(path, subject_of(schedule, definition(), layout), {"verdict": verdict})
    return path


def refusal(path, schedule, config=None, layout=LARGE):
    with pytest.raises(ConfigError) as error:
        require_certificate(path, subject_of(schedule, definition(config), layout))
    return str(error.value)


def test_it_speaks_for_the_same_kinds_of_parallelism_at_any_size(tmp_path, schedule):
    path = certified(tmp_path, schedule)
    require_certificate(path, subject_of(schedule, definition(), LARGE))
    require_certificate(path, subject_of(schedule, definition(), ParallelDims(pipeline_model_parallel_size=4)))
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


def test_a_kind_that_it_was_made_without_is_named(tmp_path, schedule):
    path = certified(tmp_path, schedule)
    more = ParallelDims(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, context_parallel_size=2
    )
    assert "it was made without VPP, CP" in refusal(path, schedule, layout=more)
    assert "made with SP, and the run is without" in refusal(
        path, schedule, layout=ParallelDims(tensor_model_parallel_size=4)
    )


def test_one_that_was_made_in_bf16_is_refused(tmp_path, schedule):
    path = tmp_path / "certificate.json"
    write_certificate(path, subject_of(schedule, definition(), SMALL), {"verdict": "equal", "bf16": True})
    assert "it was made with --bf16" in refusal(path, schedule)


def test_one_of_a_copy_that_lacks_a_layer_of_the_model_is_refused(tmp_path, schedule):
    path = tmp_path / "certificate.json"
    found = {"verdict": "equal", "lacks": ["layers.5 (mixer: Attention)"]}
    write_certificate(path, subject_of(schedule, definition(), SMALL), found)
    assert "its copy of the model had no layer like layers.5 (mixer: Attention)" in refusal(path, schedule)


def test_everything_that_differs_is_told_at_once(tmp_path, schedule):
    path = certified(tmp_path, schedule, verdict="wrong")
    held = json.loads(path.read_text())
    held["versions"]["torch"] = "1.0"
    path.write_text(json.dumps(held))
    with open(schedule, "a") as file:
        file.write("# changed\n")
    told = refusal(path, schedule, LlamaConfig(hidden_act="gelu"))
    assert "its verdict is 'wrong'" in told
    assert "and was 1.0" in told
    assert "the schedule is another one" in told
    assert "the model is another one" in told


def test_another_adapter_has_a_certificate_of_its_own(tmp_path, schedule):
    adapter = tmp_path / "adapter.py"
    adapter.write_text("ADAPTER = 1\n")
    held = subject_of(schedule, definition(), SMALL, str(adapter))
    path = tmp_path / "certificate.json"
    write_certificate(path, held, {"verdict": "equal"})
    same = adapter.rename(tmp_path / "other_name.py")
    require_certificate(path, subject_of(schedule, definition(), LARGE, str(same)))
    assert "the adapter is another one" in refusal(path, schedule)
    same.write_text("ADAPTER = 2\n")
    with pytest.raises(ConfigError, match="the adapter is another one"):
        require_certificate(path, subject_of(schedule, definition(), LARGE, str(same)))


def test_an_installed_adapter_counts_by_its_package(tmp_path, schedule, monkeypatch):
    path = certified(tmp_path, schedule)
    origin = "mine = module:ADAPTER of package 1.1"
    monkeypatch.setattr("megasched.trainer.evidence.certificate.adapter_origin", lambda model_type: origin)
    assert "the adapter is another one" in refusal(path, schedule)


def test_an_option_that_was_not_checked_is_another_model(tmp_path, schedule):
    path = certified(tmp_path, schedule)
    assert "the model is another one" in refusal(path, schedule, LlamaConfig(attention_bias=True))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("{", "it is no JSON"),
        ("[]", "the whole is a list, an object is due; expected a certificate of format 4"),
        ('{"format": 9}', "it is of format 9; expected a certificate of format 4"),
        ('{"format": 4, "versions": {"torch": 2}}', r"versions\.torch is 2, text is due"),
    ],
)
def test_what_is_no_certificate_is_refused(tmp_path, text, words):
    path = tmp_path / "certificate.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_certificate(path)


def test_one_that_cannot_be_written_is_an_error_that_says_so(tmp_path, schedule):
    with pytest.raises(ConfigError, match="it can't be written"):
        certified(tmp_path / "missing", schedule)


def test_a_schedule_counts_by_its_file_and_a_name_by_all_that_it_says(tmp_path):
    (tmp_path / "a:b").mkdir()
    file = tmp_path / "a:b" / "my.py"
    file.write_text("text")
    told = {
        name: subject_of(name, definition(), SMALL)["schedule"] for name in (f"{file}:one", "auto:a=1", "x:a=1")
    }
    assert told[f"{file}:one"]["name"] == "one"
    assert told[f"{file}:one"]["sha256"] == hashlib.sha256(b"text").hexdigest()
    assert (told["auto:a=1"]["name"], told["x:a=1"]["name"]) == ("auto:a=1", "x:a=1")


def module_of(folder, text):
    (folder / "norms.py").write_text(text)
    spec = importlib.util.spec_from_file_location("norms", folder / "norms.py")
    found = importlib.util.module_from_spec(spec)
    sys.modules["norms"] = found
    linecache.checkcache()
    spec.loader.exec_module(found)
    return found.Norm()


@pytest.mark.parametrize(
    ("was", "now", "told"),
    [
        ("return half(x)", "return half(x) + 1", "the class norms.Norm has other code than it had"),
        ("x / 2", "x / 3", "norms.py has other code beside its classes"),
        (None, None, "the class norms.Norm was not there"),
    ],
)
def test_a_class_that_has_changed_is_named(tmp_path, schedule, was, now, told):
    path = tmp_path / "certificate.json"
    before = module_of(tmp_path, HEAD)
    given = definition(None, *([before] if was else []))
    write_certificate(path, subject_of(schedule, given, SMALL), {"verdict": "equal"})
    require_certificate(path, subject_of(schedule, given, LARGE))
    changed = definition(None, module_of(tmp_path, HEAD.replace(was, now) if was else HEAD))
    with pytest.raises(ConfigError, match=told) as error:
        require_certificate(path, subject_of(schedule, changed, LARGE))
    assert str(error.value).count("\n  - ") == 1


def test_a_function_in_another_file_that_has_changed_is_told(tmp_path, schedule, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "halves", raising=False)
    (tmp_path / "halves.py").write_text("def half(x):\n    return x / 2\n")
    text = HEAD.replace("def half(x):\n    return x / 2\n", "from halves import half\n")
    given = definition(None, module_of(tmp_path, text))
    subject = subject_of(schedule, given, SMALL)
    assert sorted(subject["classes"]) == ["halves.py", "norms.Norm", "norms.py"]
    path = tmp_path / "certificate.json"
    write_certificate(path, subject, {"verdict": "equal"})
    (tmp_path / "halves.py").write_text("def half(x):\n    return x / 3\n")
    with pytest.raises(ConfigError, match=r"halves\.py has other code beside its classes"):
        require_certificate(path, subject_of(schedule, given, SMALL))


@pytest.mark.parametrize(
    "line",
    ["import mine.deep", "from mine import deep", "def schedule(sch, layout):\n    from mine.deep import half"],
)
def test_what_a_schedule_imports_that_has_changed_is_told(tmp_path, monkeypatch, line):
    """It is what the schedule replaces modules by; constants and what is imported late count."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    (tmp_path / "mine" / "deep.py").write_text("from .values import HALF\nfrom torch import nn\n")
    (tmp_path / "mine" / "values.py").write_text("HALF = 0.5\n")
    schedule = tmp_path / "schedule.py"
    schedule.write_text(f"{line}\n")
    path = certified(tmp_path, str(schedule))
    require_certificate(path, subject_of(str(schedule), definition(), LARGE))
    (tmp_path / "mine" / "values.py").write_text("HALF = 0.25\n")
    assert "values.py has other code beside its classes" in refusal(path, str(schedule))
    (tmp_path / "mine" / "deep.py").unlink()
    assert "deep.py has other code beside its classes" in refusal(path, str(schedule))
    assert not {"mine", "mine.deep"} & sys.modules.keys()


def test_what_an_adapter_imports_that_has_changed_is_told(tmp_path, schedule, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "globs_of_mine.py").write_text("OUT = 'attn.out'\n")
    adapter = tmp_path / "adapter.py"
    adapter.write_text("from globs_of_mine import OUT\n")

    def subject():
        return subject_of(schedule, definition(), SMALL, str(adapter))

    path = tmp_path / "certificate.json"
    write_certificate(path, subject(), {"verdict": "equal"})
    require_certificate(path, subject())
    (tmp_path / "globs_of_mine.py").write_text("OUT = 'column'\n")
    with pytest.raises(ConfigError, match=r"globs_of_mine\.py has other code"):
        require_certificate(path, subject())


@pytest.fixture
def of_an_editable_package(tmp_path, monkeypatch):
    """A module whose file changes, and its version does not."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "values_of_package.py").write_text("HALF = 0.5\n")
    text = "import values_of_package\n\ndef schedule(sch, layout, a=0): ...\n"
    (tmp_path / "editable.py").write_text(text)
    yield tmp_path
    sys.modules.pop("editable", None)
    sys.modules.pop("values_of_package", None)


def test_the_code_of_an_installed_adapter_counts(of_an_editable_package, tmp_path, schedule, monkeypatch):
    origin = "mine = editable:ADAPTER of package 1.1"
    monkeypatch.setattr("megasched.trainer.evidence.certificate.adapter_origin", lambda model_type: origin)
    path = certified(tmp_path, schedule)
    require_certificate(path, subject_of(schedule, definition(), LARGE))
    (of_an_editable_package / "values_of_package.py").write_text("HALF = 0.25\n")
    assert "values_of_package.py has other code beside its classes" in refusal(path, schedule)


def test_the_code_of_a_registered_schedule_counts(of_an_editable_package, tmp_path, monkeypatch):
    point = EntryPoint("theirs", "editable:schedule", schedule_file.GROUP)
    monkeypatch.setattr(schedule_file, "entry_points", lambda group: [point])
    path = certified(tmp_path, "theirs:a=1")
    require_certificate(path, subject_of("theirs:a=1", definition(), LARGE))
    (of_an_editable_package / "editable.py").write_text("def schedule(sch, layout, a=0): 1 / 0\n")
    told = refusal(path, "theirs:a=1")
    assert "editable.py has other code beside its classes" in told


def test_of_two_files_of_one_name_both_count(tmp_path, monkeypatch):
    """One beside the schedule, and one that the model's code imports."""
    monkeypatch.syspath_prepend(tmp_path)
    for package in ("of_model", "of_schedule"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
        (tmp_path / package / "ops.py").write_text("from torch import nn\n")
    text = HEAD.replace("def half(x):\n    return x / 2\n", "from of_model.ops import half\n")
    (tmp_path / "of_model" / "ops.py").write_text("def half(x):\n    return x / 2\n")
    schedule = tmp_path / "schedule.py"
    schedule.write_text("import of_schedule.ops\n")
    given = definition(None, module_of(tmp_path, text))
    path = tmp_path / "certificate.json"
    write_certificate(path, subject_of(str(schedule), given, SMALL), {"verdict": "equal"})
    require_certificate(path, subject_of(str(schedule), given, SMALL))
    (tmp_path / "of_model" / "ops.py").write_text("def half(x):\n    return x / 3\n")
    with pytest.raises(ConfigError, match=r"ops\.py has other code"):
        require_certificate(path, subject_of(str(schedule), given, SMALL))


def test_another_version_of_a_package_that_the_code_imports_is_told(tmp_path):
    schedule = tmp_path / "schedule.py"
    schedule.write_text("import safetensors\nimport math\nimport megasched\n")
    path = certified(tmp_path, str(schedule))
    held = json.loads(path.read_text())
    assert held["imports"] == {"safetensors": version("safetensors")}
    path.write_text(json.dumps(held | {"imports": {"safetensors": "0.1"}}))
    assert f"safetensors, which its code imports, is {version('safetensors')} here, and was 0.1" in refusal(
        path, str(schedule)
    )
    path.write_text(json.dumps(held | {"imports": {}}))
    require_certificate(path, subject_of(str(schedule), definition(), LARGE))


def test_a_schedule_may_say_itself_where_its_imports_lie(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "values_of_lib.py").write_text("HALF = 0.5\n")
    schedule = tmp_path / "schedule.py"
    schedule.write_text(
        f"import sys\nsys.path.append({str(tmp_path / 'lib')!r})\n"
        "def schedule(sch, layout):\n    import values_of_lib\n"
    )
    found = SimpleNamespace(hf_model=tiny.save("llama", tmp_path), objective="causal_lm", layout=SMALL)
    found.schedule, found.to_dict = str(schedule), lambda: {"verdict": "equal"}
    certify(found, tmp_path / "certificate.json")
    assert "values_of_lib.py" in read_certificate(tmp_path / "certificate.json")["classes"]


def test_a_class_without_source_is_not_spoken_for(schedule):
    kind = type("Made", (nn.Module,), {"__module__": "nowhere"})
    with pytest.raises(ConfigError, match="no certificate speaks for nowhere"):
        subject_of(schedule, definition(None, kind()), SMALL)
