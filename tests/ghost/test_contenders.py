"""Each contender of the benchmarks builds its model on a ghost GPU, and makes a step."""

import importlib.util
import json
import sys
from dataclasses import asdict

import pytest

from tests.ghost import process
from tests.ghost.ledger import kernels

sys.path.insert(0, str(process.ROOT / "bench"))  # scripts, which find each other there

import contenders
import trainer_side

NAMES = list(contenders.all_contenders())

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("te", [False, True], ids=["without TE", "with TE"])
def test_a_contender_makes_a_step(tmp_path, name, te, request):
    if te:
        request.getfixturevalue("transformer_engine")
    setting = trainer_side.Setting("tiny", bf16=True, extra=() if te else process.WITHOUT_TE)
    spec = {**asdict(contenders.all_contenders()[name]), "layers": 2, "setting": asdict(setting)}
    output = tmp_path / "events.json"
    worker = [str(process.ROOT / "bench" / "layer_worker.py"), json.dumps(spec), str(output)]
    if name == "hf_liger" and importlib.util.find_spec("liger_kernel") is None:
        with pytest.raises(process.Failed, match="No module named 'liger_kernel'"):
            process.run(worker, te=te)
        return
    said = process.run(worker, te=te)
    step = json.loads(output.read_text())["step"]
    assert kernels(step).total() > 0
    assert "isn't covered" not in said
