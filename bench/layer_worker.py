"""One contender's model on a ghost GPU: what a forward, a backward and a step ask of it (``layer_kernels.py``).

python bench/layer_worker.py '{"builder": ..., "schedule": ..., "layers": 2, "setting": {...}}' OUT.json
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import shapes
import trainer_side


def count(builder: str, schedule: str, layers: int, setting: dict[str, Any]) -> dict[str, Any]:
    """The events of a forward, a backward and a step, and bytes: kept for the backward, and all that is there."""
    import torch
    import traffic

    from tests.ghost.ledger import recording

    shape = setting.pop("shape")
    shapes.SHAPES["counted"] = {**shapes.SHAPES[shape], "num_hidden_layers": layers}
    chosen = trainer_side.Setting("counted", **{**setting, "extra": tuple(setting["extra"])})
    args = trainer_side.start(chosen, schedule)
    side, data = trainer_side.build(args, builder), trainer_side.batches(chosen)
    side.step(data)  # what is made once, e.g. workspaces
    side.step(data)
    model = side.model[0]
    model.zero_grad_buffer()
    before = torch.cuda.memory_allocated()
    with recording() as forward:
        output, loss_func = trainer_side.forward_step(data, model)
        loss = loss_func(output)[0]
    kept = torch.cuda.memory_allocated() - before
    with recording() as backward:
        loss.backward()
    with recording() as step:
        side.step(data)
    with traffic.counting() as moved:
        output, loss_func = trainer_side.forward_step(data, model)
        loss_func(output)[0].backward()
    return {
        **{"forward": forward, "backward": backward, "step": step},
        **{"kept": kept, "before": before, "moved": moved},
    }


if __name__ == "__main__":
    logging.disable(logging.INFO)
    asked, output = json.loads(sys.argv[1]), Path(sys.argv[2])  # Megatron's flags take their place
    counted = count(**asked)
    if os.environ["RANK"] == "0":
        output.write_text(json.dumps(counted))
    sys.stdout.flush()
    os._exit(0)  # process groups and threads are nobody's business any more
