"""Checks what a run is to load before Megatron reads it.

Megatron's loader stops at the first key that is missing, passes over keys that are too many, and reports a damaged
file in tracebacks that do not name it. A checkpoint's metadata shows all of this at once.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.api import CheckpointException

from megasched.errors import CheckpointError
from megasched.language.lora import A, B
from megasched.reading.tracker import RELEASE
from megasched.trainer.checkpoint.buffers import persistent_buffers
from megasched.trainer.checkpoint.config_differences import refuse_another_config, tell_of_another_config
from megasched.trainer.checkpoint.gradient_buffers import digest_of
from megasched.trainer.checkpoint.one_writer import on_rank_0
from megasched.trainer.checkpoint.source import loaded_folder
from megasched.trainer.flags.model_shape import heads_for_tp, sizes_of
from megasched.trainer.session import Session
from megasched.weights.source import padded_lengths
from megasched.weights.torch_dist.reader import TorchDist, checkpoint_folder

# Adapters: a checkpoint of the model alone has none, and they begin as their initialisation says.
ADAPTER = re.compile(rf"\.(?:{A}|{B})\.")

# Megatron's names of optimizer states that lie as the gradient buffers do, and why those may not fit.
BUFFERS = "optimizer.distributed.dp_group_idx"
_DISTRIBUTED = ("use_distributed_optimizer", "use_layer_wise_distributed_optimizer")
BOUND = (
    "its optimizer's states lie as the gradients of that run lay in memory: they fit the same layout, schedule "
    "and trained parameters alone. Resume it with --no-load-optim; states that fit any run are written with "
    "--dist-ckpt-optim-fully-reshardable"
)
# What Megatron says of learning rates that are not those of the checkpoint: core/optimizer_param_scheduler.py:333,
# and core/optimizer/optimizer.py:641, which is a KeyError of a tuple in core/optimizer/distrib_optimizer.py:969.
_OTHER_SCHEDULE = re.compile(r"value (\S+) and checkpoint ?value (\S+) for (.+) do not match")
_OTHER_GROUPS = "Could not find parameter group with key"


def loaded(
    load: Callable[[], Any], models: Sequence[Any], args: Namespace, session: Session, load_arg: str
) -> Any:
    """Checks the checkpoint, then calls Megatron's ``load`` and returns its result; on all ranks together.

    Args:
        load: ``load_checkpoint`` with its arguments.
        models: the chunks of this rank, as Megatron wrapped them.
        args: Megatron's arguments.
        load_arg: name of the argument that holds the folder to load from.

    Raises:
        CheckpointError: on every rank, if the checkpoint is not complete, is damaged, or does not fit the model.
    """
    args.gradient_buffers = digest_of(models)
    to_load = _to_load(args, load_arg)
    if to_load is None:
        return load()
    folder, starts_anew = to_load
    checked = on_rank_0(lambda: _check_for(args, session, folder, starts_anew))
    chunks, heads = unwrap_model(list(models)), args.num_attention_heads
    for chunk in chunks:
        chunk.not_loaded = checked.begins
    args.num_attention_heads = checked.heads or heads
    try:
        result = _told(load, folder)
    finally:
        args.num_attention_heads = heads
        for chunk in chunks:
            chunk.not_loaded = frozenset()
    _refuse_nan(chunks, folder)
    return result


def check_load(args: Namespace, session: Session) -> None:
    """Checks the checkpoint that a run is to load, as far as that can be known before its model is built.

    Raises:
        CheckpointError: it is not complete, is damaged, or does not fit the run.
    """
    to_load = _to_load(args, "load")
    if to_load is not None:
        _check_for(args, session, *to_load)


def _to_load(args: Namespace, load_arg: str) -> tuple[Path, bool] | None:
    """Returns the ``--save`` folder, or the checkpoint in it, that is loaded, and whether the run begins anew.

    None where nothing is loaded, or not from a folder.
    """
    found_in = loaded_folder(args, load_arg)
    if found_in is None:
        return None
    folder, starts_anew = found_in
    step = getattr(args, "ckpt_step", None)
    return (folder / f"iter_{step:07d}" if step else folder), starts_anew


def _check_for(args: Namespace, session: Session, folder: Path, starts_anew: bool) -> Checked:
    resumes = not (starts_anew or args.no_load_optim)
    return check(folder, session, starts_anew=starts_anew, states_in=args if resumes else None)


def _refuse_states(folder: Path, written: Any, run: Any) -> None:
    """Refuses states of an optimizer that fit other layouts than that of the run.

    Experts have an optimizer of their own above EP 1: without the distributed optimizer states know their
    parameters by numbers in it. With it, states may lie in pieces of gradient buffers; Megatron refuses those at
    another TP or PP (``checkpointing.py:2246``), and names a flag that is on anyway.

    Args:
        written: Megatron's arguments in the checkpoint; None where there are none.
        run: those of the run that loads it.

    Raises:
        CheckpointError: for these.
    """
    if getattr(written, "no_save_optim", False):
        return
    by, now_by = _optimizer(written), _optimizer(run)
    if written is not None and by != now_by:
        raise CheckpointError(
            f"{folder}: its optimizer's states are of {by}, and this run has {now_by}. Say the flags that it was "
            "written with, or begin with other states: --no-load-optim"
        )
    before, ep = getattr(written, "expert_model_parallel_size", 1), run.expert_model_parallel_size
    if (before > 1) != (ep > 1) and not getattr(written, "use_distributed_optimizer", True):
        raise CheckpointError(
            f"{folder}: its optimizer's states are of EP {before}, written without --use-distributed-optimizer; "
            f"they can't be resumed at EP {ep}. Resume it with --no-load-optim; states for any EP are written "
            "with --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
        )
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    at, now = ("TP {} x PP {}".format(*(getattr(one, size, 1) for size in sizes)) for one in (written, run))
    if at != now and _in_buffers(written):
        raise CheckpointError(f"{folder}: written at {at}, loaded at {now}: {BOUND}")
    refuse_other_buffers(written, run)


def refuse_other_buffers(written: Any, run: Any) -> None:
    """Refuses states that lie as gradients did, where those of the run lie otherwise.

    Args:
        written, run: Megatron's arguments of the run that has written a checkpoint, and of the one that loads it.

    Raises:
        CheckpointError: for these.
    """
    own = getattr(run, "gradient_buffers", None)  # unknown before the run's model is built
    if _in_buffers(written) and own not in (None, getattr(written, "gradient_buffers", "")):
        what = "the checkpoint was written with gradients elsewhere in their buffers than this run's"
        raise CheckpointError(f"{what}: {BOUND}")


def _optimizer(args: Any) -> str:
    """Returns the flags that say whose states a run has."""
    flags = [f"--{name.replace('_', '-')}" for name in _DISTRIBUTED if getattr(args, name, False)]
    flags = flags or [f"without --{_DISTRIBUTED[0].replace('_', '-')}"]
    return " ".join([f"--optimizer {getattr(args, 'optimizer', '')}", *flags])


def _in_buffers(written: Any) -> bool:
    """Returns whether a checkpoint has states that lie as gradients did, by the arguments in it."""
    if getattr(written, "no_save_optim", False) or getattr(written, "dist_ckpt_optim_fully_reshardable", False):
        return False
    return any(getattr(written, name, False) for name in _DISTRIBUTED)


def _refuse_nan(chunks: Sequence[Any], folder: Path) -> None:
    """Refuses a checkpoint from which some rank has loaded NaN.

    Raises:
        CheckpointError: on every rank, with the names of all such parameters and buffers.
    """
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, [name for chunk in chunks for name in chunk.names_with_nan()])
    names = sorted({name for of_rank in found for name in of_rank})
    if names:
        why = [f"{name} has NaN in it: it comes from a run that diverged, or is damaged" for name in names]
        raise _refusal(checkpoint_folder(folder), why)


def _told(load: Callable[[], Any], folder: Path) -> Any:
    """Calls ``load``, with errors that say which part of the checkpoint could not be read."""
    try:
        return load()
    except CheckpointingException as error:  # what Megatron itself raises on purpose
        raise CheckpointError(f"{folder}: {error}") from error
    except CheckpointException as error:  # torch's, a BaseException: what ranks have raised while they read
        said = {str(raised): None for raised, _ in error.failures.values()}
        bound = [BOUND] if any(BUFFERS in text for text in said) else []
        raise _refusal(folder, _unreadable(folder) or [*said, *bound]) from error
    except Exception as error:
        why = _unreadable(folder) or _other_rates(error)
        if why:
            raise _refusal(folder, why) from error
        raise


def _other_rates(error: Exception) -> list[str]:
    """Returns what to do about an error of Megatron's on learning rates that are not those of the checkpoint."""
    said = str(error)
    if found := _OTHER_SCHEDULE.search(said):
        ours, kept, what = found.groups()
        what = what.replace("iterations", "iterations, in samples,")
        way = (
            "--override-opt-param-scheduler goes on with this one, --use-checkpoint-opt-param-scheduler with that"
        )
        return [f"{what} is {kept} there, and {ours} in this run; {way}"]
    if _OTHER_GROUPS in said or (isinstance(error, KeyError) and isinstance(error.args[0], tuple)):
        what = (
            "it was written with another --lr or --min-lr, by which Megatron finds the states of parameters again"
        )
        return [f"{what}: give the same, or --no-load-optim to begin with new ones"]
    return []


def _unreadable(folder: Path) -> list[str]:
    return TorchDist(checkpoint_folder(folder)).unreadable()


def _refusal(folder: Path, why: list[str]) -> CheckpointError:
    return CheckpointError("\n    ".join([f"{folder}: the checkpoint can't be loaded:", *why]))


@dataclass(frozen=True)
class Checked:
    """Tells what a checkpoint that can be loaded has otherwise than the run that loads it.

    Attributes:
        begins: parameters of LoRA adapters that begin in this run, as it starts anew and the checkpoint has none.
        heads: number of attention heads in the arguments of the run that has written it, if that is what
            ``heads_for_tp`` makes of the model's at the TP of that run. Megatron compares it with this run's.
    """

    begins: frozenset[str]
    heads: int | None


def _of_adapters(wanted: Collection[str], stored: Collection[str]) -> list[str]:
    """Returns what would be right where the adapters of LoRA are in the checkpoint or the model alone."""
    ours, theirs = ([name for name in names if ADAPTER.search(name)] for names in (wanted, stored))
    if theirs and not ours:
        what = f"  remedy: it has {len(theirs) // 2} LoRA adapters, and this schedule makes none: give the "
        return [f"{what}--model-schedule that it was trained with; or merge them, by `megasched export`"]
    if ours and not theirs:
        return ["  remedy: it has no LoRA adapters: --finetune begins anew, with the ones of this schedule"]
    return []


def check(load: Path, session: Session, *, starts_anew: bool, states_in: Any = None) -> Checked:
    """Checks a checkpoint by its metadata alone.

    Args:
        load: a ``--save`` folder or one of its checkpoints.
        starts_anew: the run takes the weights and begins at iteration 0.
        states_in: Megatron's arguments of a run that loads the optimizer's states, too; otherwise None.

    Raises:
        CheckpointError: it is not complete, damaged, or names and shapes are not those of the model; the run goes
            on from it with another config.
    """
    folder = checkpoint_folder(load)
    checkpoint = TorchDist(folder)
    checkpoint.check_files()
    common = checkpoint.common
    if folder.name != RELEASE and not starts_anew and "iteration" not in common:
        raise CheckpointError(
            f"{folder}: it does not say after which iteration it was written; --finetune begins anew"
        )
    stored = checkpoint.model
    wanted = {placement.name: placement for placement in session.plan.placements.values()}
    vocabulary = session.plan.vocabulary
    buffers = persistent_buffers(session.definition)
    args = common.get("args")
    anew = starts_anew or folder.name == RELEASE
    adapters = frozenset(name for name in wanted if ADAPTER.search(name)) if anew else frozenset()
    begins = adapters if adapters.isdisjoint(stored) else frozenset()
    wrong = {
        "missing": [name for name in wanted if name not in stored and name not in begins],
        "unexpected": [name for name in stored if name not in wanted and name not in buffers],
        "of another shape": [
            f"{name}: {list(stored[name].shape)} in the checkpoint, {list(placement.shape)} in the model"
            for name, placement in wanted.items()
            if name in stored
            and stored[name].shape != placement.shape
            and not (name in vocabulary and _fits(stored[name].shape, placement.shape, args))
        ],
    }
    if any(wrong.values()):
        lines = [f"the checkpoint {folder} does not fit the model"]
        for title, names in wrong.items():
            lines += [f"  {title} ({len(names)}):", *(f"    {name}" for name in sorted(names))] if names else []
        raise CheckpointError("\n".join([*lines, *_of_adapters(wanted.keys(), stored.keys())]))
    if states_in is not None and not anew:
        _refuse_states(folder, args, states_in)
    compare_config = tell_of_another_config if anew else refuse_another_config
    compare_config(folder, session.definition.config)
    return Checked(begins, _heads(session, args))


def _heads(session: Session, args: Any) -> int | None:
    """Returns the number of heads in a checkpoint's arguments, if it follows from the model's and the TP there."""
    tp = getattr(args, "tensor_model_parallel_size", None)
    if not isinstance(tp, int) or tp < 1:
        return None
    heads: int = heads_for_tp(sizes_of(session.definition), tp)["num_attention_heads"].value
    return heads if heads == getattr(args, "num_attention_heads", None) else None


def _fits(found: tuple[int, ...], shape: tuple[int, ...], args: Any) -> bool:
    """Returns whether a stored tensor over a vocabulary can be a parameter: it may have its writer's padding."""
    return found[1:] == shape[1:] and found[0] in padded_lengths(shape[0], args)
