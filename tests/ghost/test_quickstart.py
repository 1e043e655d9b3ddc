"""``megasched quickstart`` on a machine with a GPU, which is a ghost."""

import json
import re
import sys

import pytest

from tests.ghost import process

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("te", [False, True], ids=["without TE", "with TE"])
def test_quickstart_trains_on_a_gpu_and_goes_on_from_its_checkpoint(tmp_path, te, request):
    if te:
        request.getfixturevalue("transformer_engine")
    options = ["--json", "--iters", "3", "--dir", str(tmp_path)]
    said = process.run_command([sys.executable, "-m", "megasched", "quickstart", *options], te=te)
    result = json.loads(said[said.rindex("\n{") :])
    assert result["ranks"] == 1
    engine = "with" if te else "without"
    assert result["machine"].startswith("1 rank (a GPU each, bf16)")
    assert result["machine"].endswith(f"{engine} Transformer Engine")
    log = (tmp_path / "run-1" / "train.log").read_text()
    assert _iterations(log) == [1, 2, 3]
    assert "isn't covered" not in log

    (resume,) = [each["command"] for each in result["next"] if each["what"].startswith("go on")]
    then = process.run_command(["bash", "-c", resume.replace("--train-iters 53", "--train-iters 5")], te=te)
    assert _iterations(then) == [4, 5]
    assert "isn't covered" not in then


def _iterations(log):
    return [int(number) for number in re.findall(r" iteration +(\d+)/", log)]
