"""Lets one run alone write to a ``--save`` folder, in which only complete checkpoints appear."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megasched.attributes import Undo, call_after, resolve, set_attribute, wrap_attribute
from megasched.patches.registry import Patch
from megasched.trainer.current_session import get_session, has_session

Function = Callable[..., Any]

_PRETRAIN = "megatron.training.training:pretrain"
_SETUP = "megatron.training.training:setup_model_and_optimizer"
_SAVE = "megatron.core.dist_checkpointing:save"
_SAVE_CHECKPOINT = "megatron.training.training:save_checkpoint"
_STORAGE = "megatron.training.checkpointing:maybe_msc"
_TRACKER = "megatron.training.checkpointing:get_checkpoint_tracker_filename"
# The writer of the run that goes on in this process.
_writers: list[Any] = []


def _change() -> list[Undo]:
    from megasched.trainer.checkpoint.one_writer import Storage

    storage = Storage(
        resolve(_STORAGE), Path(resolve(_TRACKER)("")).name, lambda: _writers[-1] if _writers else None
    )
    return [
        call_after(_PRETRAIN, _release, rebind=("megatron", "megasched")),
        wrap_attribute(_SETUP, _claimed),
        wrap_attribute(_SAVE_CHECKPOINT, _begun),
        wrap_attribute(_SAVE, _written),
        set_attribute(_STORAGE, storage),
    ]


def _claimed(setup: Function, /, *given: Any, **named: Any) -> Any:
    """Claims the folder before the setup; nobody else adds a checkpoint from then on.

    What lies where in the gradient buffers is kept in each checkpoint, with the other arguments.
    """
    from megatron.core.utils import unwrap_model
    from megatron.training.global_vars import get_args

    from megasched.trainer.checkpoint.gradient_buffers import digest_of
    from megasched.trainer.checkpoint.one_writer import OneWriter
    from megasched.trainer.scheduled_model import ScheduledModel

    args = get_args()
    if args.save is not None and "://" not in args.save and not _writers:
        _writers.append(OneWriter(args.save))
    found = setup(*given, **named)
    if _writers and (claim := _writers[-1].claim) is not None:  # on rank 0
        claim.tell_of_what_is_ahead(args.iteration)
    ours = all(isinstance(chunk, ScheduledModel) for chunk in unwrap_model(found[0]))
    if ours and "gradient_buffers" not in args:  # a run that loads knows it already
        args.gradient_buffers = digest_of(found[0])
    return found


def _begun(save: Function, iteration: int, *given: Any, non_persistent_ckpt: bool = False, **named: Any) -> Any:
    """Tells the writer before a save that a checkpoint begins; one to stay, in the folder itself."""
    if _writers and not non_persistent_ckpt:
        _writers[-1].begin(iteration)
    return save(iteration, *given, non_persistent_ckpt=non_persistent_ckpt, **named)


def _written(save: Function, sharded_state_dict: Any, checkpoint_dir: Any, *given: Any, **named: Any) -> Any:
    """Saves through the writer where the path is in the writer's folder."""

    def write(folder: Any) -> Any:
        return save(sharded_state_dict, folder, *given, **named)

    if not _writers or not _writers[-1].covers(checkpoint_dir):
        return write(checkpoint_dir)
    return _writers[-1].write(write, Path(checkpoint_dir), _keep_hf_files)


def _keep_hf_files(folder: Path) -> None:
    from megasched.trainer.checkpoint.source import keep_hf_files

    if has_session():  # else Megatron trains a model of its own
        session = get_session()
        keep_hf_files(folder, session.definition, session.hf_model, session.schedule)


def _release() -> None:
    while _writers:
        _writers.pop().release()


PATCH = Patch(
    name="one_writer",
    targets=(_PRETRAIN, _SETUP, _SAVE_CHECKPOINT, _SAVE, _STORAGE, _TRACKER),
    why=(
        "megatron/training/checkpointing.py:1011 writes the tracker in place, and every checkpoint into its final "
        "folder; nothing keeps a run that a cluster has given up from writing over its successor's"
    ),
    change=_change,
    signature={_SAVE: ("sharded_state_dict", "checkpoint_dir"), _SAVE_CHECKPOINT: ("iteration",)},
)
