"""Lets one run alone write to a ``--save`` folder, in which only complete checkpoints appear."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from megasched.attributes import Undo, call_after, resolve, set_attribute
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
        set_attribute(_SETUP, _claimed(resolve(_SETUP))),
        set_attribute(_SAVE_CHECKPOINT, _begun(resolve(_SAVE_CHECKPOINT))),
        set_attribute(_SAVE, _written(resolve(_SAVE))),
        set_attribute(_STORAGE, storage),
    ]


def _claimed(setup: Function) -> Function:
    """Wraps the setup so that it first claims the folder; nobody else adds a checkpoint from then on.

    What lies where in the gradient buffers is kept in each checkpoint, with the other arguments.
    """

    @wraps(setup)
    def claimed(*given: Any, **named: Any) -> Any:
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

    return claimed


def _begun(save_checkpoint: Function) -> Function:
    """Wraps a save so that the writer learns first that a checkpoint begins; one to stay, in the folder itself."""

    @wraps(save_checkpoint)
    def begun(iteration: int, *given: Any, non_persistent_ckpt: bool = False, **named: Any) -> Any:
        if _writers and not non_persistent_ckpt:
            _writers[-1].begin(iteration)
        return save_checkpoint(iteration, *given, non_persistent_ckpt=non_persistent_ckpt, **named)

    return begun


def _written(save: Function) -> Function:
    """Wraps a save so that it goes through the writer, for paths in the writer's folder."""

    @wraps(save)
    def written(sharded_state_dict: Any, checkpoint_dir: Any, *given: Any, **named: Any) -> Any:
        def write(folder: Any) -> Any:
            return save(sharded_state_dict, folder, *given, **named)

        if not _writers or not _writers[-1].covers(checkpoint_dir):
            return write(checkpoint_dir)
        return _writers[-1].write(write, Path(checkpoint_dir), _keep_hf_files)

    return written


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
