"""A run begun as on the cluster and stopped before it trains; a process of its own, for ``checks.py``.

The training script itself runs, as rank 0 of the whole job (``WORLD_SIZE`` says of how many), up to its call of
Megatron's ``pretrain``. So what is checked is what will run: Megatron's parser and rules, the schedule, the
layout, the weights' names, the tokenizer. CUDA is emulated, and where Transformer Engine is missing the flags that
need it are left out, and named. What was found is written to OUT, in JSON.
"""

from __future__ import annotations

import json
import math
import os
import runpy
import sys
import traceback
from argparse import Namespace
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megasched.errors import ConfigError, MegaschedError
from megasched.files import write_whole

# Bytes of a number in a checkpoint of Adam's: master weight and two moments, in float32.
_OF_OPTIMIZER = 12


class _Stopped(SystemExit):
    """Where training would begin."""


def main() -> None:
    out, script, *flags = sys.argv[1:]
    found: dict[str, Any] = {"problems": [], "warnings": []}
    try:
        _begin(script, flags, found)
    except _Stopped:
        pass
    except MegaschedError as error:
        found["problems"].append(str(error))
    except SystemExit as stop:  # argparse has said why on stderr
        found["problems"].append("" if isinstance(stop.code, int) else str(stop.code or ""))
    except Exception as error:
        found["problems"].append(_of_megatron(error, traceback.extract_tb(error.__traceback__)))
    write_whole(Path(out), [json.dumps(found)])
    sys.stdout.flush()
    os._exit(0)  # threads of libraries that were begun are of no interest


def _of_megatron(error: Exception, frames: traceback.StackSummary) -> str:
    """An error of someone else's code, with where it was raised."""
    last = frames[-1]
    text = str(error) or f"{type(error).__name__} at `{last.line}`"
    return f"{text} ({Path(last.filename).name}:{last.lineno})"


def _begin(script: str, flags: list[str], found: dict[str, Any]) -> None:
    from megasched.trainer import entry
    from megasched.trainer.flags.rehearsal import rehearsal_flags, rehearsal_mode

    path, bundled = entry.find_script(script)
    entry.check_inputs(script, entry.megasched_flags(flags))
    entry.arrange_process(path, bundled, "force")
    if find_spec("transformer_engine") is None or rehearsal_mode(flags):
        entry.refuse_unsupported(flags)
        fit = rehearsal_flags(flags)
        flags, found["unchecked"] = fit.argv, [str(one) for one in fit.replaced]
    from megasched.patches.attributes import set_attribute

    def pretrain(config: Any, *given: Any, **named: Any) -> None:
        _look(config, found)
        raise _Stopped

    # Scripts import it by name: from either place, after this.
    for target in ("megatron.training.training:pretrain", "megatron.training:pretrain"):
        set_attribute(target, pretrain, rebind=("megatron",))
    sys.argv = [str(path), *flags]
    runpy.run_path(str(path), run_name="__main__")
    raise ConfigError(f"{script} has come to its end without a call of Megatron's pretrain")


def _look(config: Any, found: dict[str, Any]) -> None:
    """What can be told of a run that is about to begin.

    Args:
        config: Megatron's ``PretrainConfigContainer``.
        found: filled in.
    """
    from megatron.training.global_vars import get_args

    from megasched.trainer.builder import stages_of_run
    from megasched.trainer.session import get_session
    from megasched.trainer.token_ids import vocabulary_of

    args, session = get_args(), get_session()
    layout = session.plan.layout
    microbatches = args.global_batch_size // (args.micro_batch_size * layout.data_parallel_size)
    found["problems"] += [
        *_interleaving(args, layout, microbatches),
        *_data(args, vocabulary_of(session.definition.config)),
    ]
    if args.log_straggler and find_spec("pynvml") is None:
        found["warnings"].append(
            "--log-straggler asks for the temperature and power of GPUs, by nvidia-ml-py, which is not installed "
            "here; where it is missing the run fails at the first log interval: pip install nvidia-ml-py"
        )
    numbers = sum(p.numel() for p in session.definition.parameters())
    trained = sum(p.numel() for p in session.definition.parameters() if p.requires_grad)
    of_optimizer = 0 if args.no_save_optim else trained * _OF_OPTIMIZER
    found |= {
        "parameters": numbers,
        "layout": str(layout),
        "microbatches": microbatches,
        "train_iters": args.train_iters,
        "save": args.save,
        "checkpoint_bytes": numbers * args.params_dtype.itemsize + of_optimizer,
        "seq_length": args.seq_length,
        "global_batch_size": args.global_batch_size,
    }
    if found["problems"] or session.plan.structure is None:
        return
    from megasched.planner.run_memory import run_memory

    try:
        stages = stages_of_run(config.model.transformer, session.plan.structure, layout.pp)
        memory = run_memory(args, session, stages, microbatches=microbatches)
        found["memory"] = [one.total for one in memory]
    except ConfigError as error:
        found["memory_unknown"] = str(error)


def _interleaving(args: Namespace, layout: Any, microbatches: int) -> Iterator[str]:
    """Megatron asks in the first step (core/pipeline_parallel/schedules.py:1133-1153)."""
    if layout.vpp == 1:
        return
    group = args.microbatch_group_size_per_vp_stage or layout.pp
    rest = microbatches % group
    if microbatches < group or 0 < rest < layout.pp:
        share = args.micro_batch_size * layout.data_parallel_size
        right = math.ceil(microbatches / group) * group * share
        yield (
            f"--global-batch-size {args.global_batch_size} gives each pipeline {microbatches} micro-batches; "
            f"interleaved ones (VPP {layout.vpp}) go in groups of {group}: {right} would be right"
        )


def _data(args: Namespace, vocabulary: int | None) -> Iterator[str]:
    """Data that is not there, is damaged, or has ids that the model does not know."""
    from megatron.training.utils import get_blend_and_blend_per_split

    from megasched.trainer.token_ids import check_data

    if args.mock_data:
        return
    try:
        blend, per_split = get_blend_and_blend_per_split(args)
    except OSError as error:
        yield f"the list of data can't be read: {error}"
        return
    blends = [blend, *(per_split or ())]
    for prefix in sorted({prefix for one in blends if one is not None for prefix in one[0]}):
        missing = [f"{prefix}{end}" for end in (".bin", ".idx") if not Path(prefix + end).is_file()]
        if "://" in prefix:
            continue
        if missing:
            yield f"no data at {prefix}: {' and '.join(missing)} missing"
            continue
        try:
            check_data(prefix, vocabulary, args.data_cache_path)
        except ConfigError as error:
            yield str(error)


if __name__ == "__main__":
    main()
