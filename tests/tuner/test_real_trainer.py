"""A search with real runs: a tiny Llama under Megatron's trainer, rehearsed on the CPU."""

import json
import os
import subprocess
import sys

from tests import tiny

SPACE = """
def space(space):
    space.choice("micro_batch_size", [2, 3])
    space.choice("recompute", [0.5], schedule=True)
"""
SCHEDULE = """
from megasched.model_adapters.default_schedule import schedule as auto

def schedule(sch, layout, recompute):
    auto(sch, layout)
    layers = sch["model.layers"]
    layers[: round(recompute * len(list(layers)))].checkpoint()
    print("recomputed:", recompute)
"""
FLAGS = """
    --rehearse --model-schedule mine.py --hf-model llama --hf-random-init --seq-length 16 --global-batch-size 4
    --train-iters 100 --lr 1e-4 --tokenizer-type NullTokenizer --vocab-size 90 --mock-data --eval-iters 0
    --eval-interval 1000
"""


def test_two_points_of_which_the_trainer_refuses_one(tmp_path):
    """A batch of 4 can't be made of micro-batches of 3."""
    tiny.save("llama", tmp_path / "llama", num_hidden_layers=2)
    (tmp_path / "myspace.py").write_text(SPACE)
    (tmp_path / "mine.py").write_text(SCHEDULE)
    one_rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    # Three of six iterations are measured: of an odd number, the median rate is that of the median time.
    # One rank needs no launcher; torchrun would take as long to start as the run does.
    command = [sys.executable, "-m", "megasched", "pretrain_gpt.py", *FLAGS.split()]
    tune = [sys.executable, "-m", "megasched", "tune", "myspace.py", "--sampler", "grid", "--iterations", "6"]
    run = subprocess.run(
        [*tune, "--json", "--", *command],
        cwd=tmp_path,
        env=os.environ | one_rank,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    outcomes = {trial["point"]["micro_batch_size"]: trial["outcome"] for trial in found["trials"]}
    assert outcomes == {2: "ok", 3: "refused"}, found
    refused = next(trial for trial in found["trials"] if trial["outcome"] == "refused")
    assert "must be divisible by" in refused["why"]
    scores = [trial["score"] for trial in found["trials"] if trial["score"]]
    assert found["best"]["score"] == max(scores)
    assert abs(found["best"]["score"] * found["best"]["seconds"] - 4) < 0.5  # 4 sequences an iteration
    assert found["best"]["command"][-2:] == ["--schedule-option", "recompute=0.5"]
    assert "recomputed: 0.5" in (tmp_path / "tune" / "logs" / "trial-0.log").read_text()
