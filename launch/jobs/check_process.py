"""Begins a run as on the cluster and stops it before it trains, in a separate process for ``checks.py``.

The training script itself runs, as rank 0 of the whole job (``WORLD_SIZE`` is its size), up to its call of
Megatron's ``pretrain``. So the check covers what will run: Megatron's parser and rules, the schedule, the
layout, the weights' names, the tokenizer. CUDA is emulated. Where Transformer Engine is missing, the flags that
need it are left out, and named. The findings are written to OUT, in JSON.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megasched.attributes import set_attribute
from megasched.errors import ConfigError
from megasched.files import write_whole
from megasched.trainer import entry
from megasched.trainer.flags.rehearsal import rehearsal_flags, rehearsal_mode
from megasched.trainer.run_failure import describe_failure


class _Stopped(SystemExit):
    """Stops the script where training would begin."""


def main() -> None:
    out, script, *flags = sys.argv[1:]
    found: dict[str, Any] = {"problems": [], "warnings": []}
    try:
        _begin(script, flags, found)
    except _Stopped:
        pass
    except SystemExit as stop:  # the script's own parser has said why on stderr
        found["problems"].append("" if isinstance(stop.code, int) else str(stop.code or ""))
    except Exception as error:
        found["problems"].append(describe_failure(error))
    write_whole(Path(out), [json.dumps(found)])
    sys.stdout.flush()
    os._exit(0)  # threads of libraries that were begun are of no interest


def _begin(script: str, flags: list[str], found: dict[str, Any]) -> None:
    path, bundled = entry.find_script(script)
    own = entry.megasched_flags(flags)
    entry.check_inputs(script, own)
    entry.check_tokenizer(flags)
    entry.arrange_process(path, bundled, "force", allow_unverified=own.allow_unverified)
    if find_spec("transformer_engine") is None or rehearsal_mode(flags):
        entry.set_cluster_flags(entry.refuse_unsupported(flags))
        fit = rehearsal_flags(flags)
        flags, found["unchecked"] = fit.argv, [str(one) for one in fit.replaced]

    def pretrain(config: Any, *given: Any, **named: Any) -> None:
        from megasched.launch.jobs.run_facts import look_at_run

        look_at_run(config, found)
        raise _Stopped

    # Scripts import it by name: from either place, after this.
    for target in ("megatron.training.training:pretrain", "megatron.training:pretrain"):
        set_attribute(target, pretrain, rebind=("megatron",))
    sys.argv = [str(path), *flags]
    runpy.run_path(str(path), run_name="__main__")
    raise ConfigError(f"{script} has come to its end without a call of Megatron's pretrain")


if __name__ == "__main__":
    main()
