"""The compatibility matrix: what is run, kept, dropped and run again; the checks are faked but for one."""

import json
import os
from pathlib import Path

import pytest

from megasched.trainer.evidence.matrix import LAYOUT_NAMES, load_matrix
from megasched.verify import matrix
from megasched.verify.matrix import (
    check_type,
    missing,
    run_matrix,
    save_matrix,
    versions,
)
from megasched.verify.parity import LAYOUTS


def result(verdict="equal"):
    return {"verdict": verdict}


class Checks:
    """Stands for ``check_type``: notes what it is asked for and says ``equal``; a type may stop the run."""

    def __init__(self):
        self.asked = []
        self.stops_at = ""

    def __call__(self, ranks, model_type, folder, layouts):
        if model_type == self.stops_at:
            raise KeyboardInterrupt
        self.asked.append((model_type, list(layouts)))
        return {name: result() for name in layouts}


@pytest.fixture
def checks(monkeypatch):
    found = Checks()
    monkeypatch.setattr(matrix, "check_type", found)
    return found


@pytest.fixture
def file(tmp_path):
    return tmp_path / "matrix.json"


def write(file, types, made_with=None):
    save_matrix({"versions": made_with or versions(), "types": types, "older": {}}, file)


def test_the_layouts_leave_out_the_run_on_one_rank():
    assert LAYOUT_NAMES == ("tp2", "tp2-sp", "pp2", "pp2-vpp2", "ep2", "tp2-pp2", "cp2", "cp2-tp2")
    assert tuple(LAYOUTS) == ("one", *LAYOUT_NAMES)


def test_everything_is_run_where_there_is_no_file(checks, file):
    run_matrix(file, ["b", "a"], ["tp2", "pp2"])
    assert checks.asked == [("b", ["tp2", "pp2"]), ("a", ["tp2", "pp2"])]
    both = {"pp2": result(), "tp2": result()}
    assert json.loads(file.read_text()) == {"versions": versions(), "types": {"a": both, "b": both}, "older": {}}
    assert list(json.loads(file.read_text())["types"]) == ["a", "b"]


def test_a_run_that_is_stopped_goes_on_where_it_was(checks, file):
    checks.stops_at = "b"
    with pytest.raises(KeyboardInterrupt):
        run_matrix(file, ["a", "b", "c"], ["tp2"])
    assert load_matrix(file)["types"] == {"a": {"tp2": result()}}
    checks.stops_at = ""
    checks.asked.clear()
    run_matrix(file, ["a", "b", "c"], ["tp2"])
    assert checks.asked == [("b", ["tp2"]), ("c", ["tp2"])]


def test_only_layouts_that_lack_are_run(checks, file):
    write(file, {"a": {"tp2": result("wrong")}, "broken": {"model": result("failed")}})
    run_matrix(file, ["a", "broken"], ["tp2", "pp2"])
    assert checks.asked == [("a", ["pp2"])]
    assert load_matrix(file)["types"]["a"] == {"tp2": result("wrong"), "pp2": result()}


def test_results_of_other_versions_are_kept_as_such_until_there_are_new_ones(checks, file):
    old, older = {**versions(), "torch": "2.0"}, {**versions(), "torch": "1.0"}
    both = {"tp2": result("wrong"), "pp2": result("wrong")}
    write(file, {"a": both, "b": both, "gone": both}, older)
    save_matrix({**load_matrix(file), "versions": old, "older": {"gone": older}}, file)
    run_matrix(file, ["a"], ["tp2"])
    assert checks.asked == [("a", ["tp2"])]
    checks.stops_at = "b"
    with pytest.raises(KeyboardInterrupt):  # what is to be checked again is there until it has been
        run_matrix(file, ["b"], ["tp2"], again=["wrong"])
    checks.stops_at = ""
    assert load_matrix(file) == {
        "versions": versions(),
        "types": {"a": {"tp2": result()}, "b": both, "gone": both},
        "older": {"b": old, "gone": older},
    }
    run_matrix(file, ["a", "b"], ["tp2"])
    assert checks.asked[1:] == [("b", ["tp2"])]
    assert load_matrix(file)["older"] == {"gone": older}


def test_verdicts_are_checked_again_when_asked_for(checks, file):
    write(
        file, {"a": {"tp2": result("failed"), "pp2": result("refused")}, "b": {"tp2": result(), "pp2": result()}}
    )
    run_matrix(file, ["a", "b"], ["tp2", "pp2"], again=["failed", "wrong"])
    assert checks.asked == [("a", ["tp2"])]
    assert load_matrix(file)["types"]["a"] == {"tp2": result(), "pp2": result("refused")}


def test_a_model_that_could_not_be_made_is_tried_again_when_asked_for(checks, file):
    write(file, {"a": {"model": result("failed")}})
    run_matrix(file, ["a"], ["tp2"], again=["failed"])
    assert load_matrix(file)["types"]["a"] == {"tp2": result()}


def test_what_is_missing():
    both = {"tp2": result(), "pp2": result()}
    found = {"types": {"a": {"tp2": result()}, "full": both, "old": both}, "older": {"old": {}}}
    expected = [("a", ["pp2"]), ("old", ["tp2", "pp2"]), ("new", ["tp2", "pp2"])]
    assert missing(found, ["a", "full", "old", "new"], ["tp2", "pp2"]) == expected


def test_a_write_that_fails_leaves_the_old_file(file, monkeypatch):
    write(file, {"a": {"tp2": result()}})
    before = file.read_text()

    def full(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        write(file, {"b": {}})
    assert file.read_text() == before
    assert list(file.parent.iterdir()) == [file]


def test_the_file_is_replaced_in_one_step(file, monkeypatch):
    """Whatever is written goes to another file of the same folder, which then takes the name."""
    seen, real = [], os.replace

    def replace(source, target):
        seen.append((os.path.dirname(source), json.loads(Path(source).read_text())["types"], os.fspath(target)))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    write(file, {"a": {"tp2": result()}})
    assert seen == [(str(file.parent), {"a": {"tp2": result()}}, str(file))]
    assert [path.name for path in file.parent.iterdir()] == ["matrix.json"]
    assert file.stat().st_mode & 0o777 == 0o644


def test_the_command_checks_again_what_it_is_told_to(checks, file):
    write(file, {"llama": {"tp2": result("wrong")}})
    matrix.main(["--types", "llama", "--layouts", "tp2", "--again", "wrong", "--output", str(file)])
    assert checks.asked == [("llama", ["tp2"])]


# ---- for real ---------------------------------------------------------------------------------------


def test_a_name_that_is_none_is_refused_before_anything_is_written(checks, file, capsys):
    with pytest.raises(SystemExit) as ended:
        matrix.main(["--types", "llama", "lama", "--output", str(file)])
    assert ended.value.code == 2
    assert "no causal language model 'lama'; did you mean llama" in capsys.readouterr().err
    assert checks.asked == []
    assert not file.exists()


def test_one_architecture(ranks, tmp_path):
    found = check_type(ranks, "gpt_neo", str(tmp_path / "gpt_neo"), ["tp2"])
    assert list(found) == ["facts", "tp2"]
    outcome, known = found["tp2"], found["facts"]
    assert (outcome["verdict"], outcome["why"]) == ("equal", "")
    assert outcome["errors"].keys() == {"loss", "logits", "gradient", "grad_norm"}
    assert max(outcome["errors"].values()) < 1e-5
    assert (known["class"], known["adapter"], known["whole"]) == ("GPTNeoForCausalLM", False, {})
    assert known["inferred"] == [
        f"transformer.h.0-3.{name}.weight"
        for name in (
            *("attn.attention.k_proj", "attn.attention.v_proj", "attn.attention.q_proj"),
            *("attn.attention.out_proj", "mlp.c_fc", "mlp.c_proj"),
        )
    ]


def test_a_model_that_can_not_be_made(ranks, tmp_path):
    found = check_type(ranks, "llama7", str(tmp_path / "llama7"), ["tp2"])
    assert list(found) == ["model"]
    assert found["model"]["verdict"] == "refused"
    assert "the installed transformers has no model type 'llama7'" in found["model"]["why"]
