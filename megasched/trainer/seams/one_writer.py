"""One run alone writes to a ``--save`` folder, and what appears there is complete."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

from megasched.patches.attributes import Undo, call_after, resolve, set_attribute, undo_all
from megasched.patches.registry import Patch

_PRETRAIN = "megatron.training.training:pretrain"
_SETUP = "megatron.training.training:setup_model_and_optimizer"
_SAVE = "megatron.core.dist_checkpointing:save"
_SAVE_CHECKPOINT = "megatron.training.training:save_checkpoint"
_STORAGE = "megatron.training.checkpointing:maybe_msc"
_WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync.write_preloaded_data"
_TRACKER = "megatron.training.checkpointing:get_checkpoint_tracker_filename"
# The writer of the run that goes on in this process.
_writers: list[Any] = []


def _change() -> Undo:
    setup, save = resolve(_SETUP), resolve(_SAVE)

    @wraps(setup)
    def claimed(*given: Any, **named: Any) -> Any:
        # Before the checkpoint is looked for: from here on nobody else adds one.
        from megatron.training.global_vars import get_args

        from megasched.trainer.checkpoint.one_writer import FORMAT, OneWriter

        args = get_args()
        if args.save is not None and args.ckpt_format == FORMAT and "://" not in args.save and not _writers:
            _writers.append(OneWriter(args.save))
        return setup(*given, **named)

    @wraps(save)
    def written(sharded_state_dict: Any, checkpoint_dir: Any, *given: Any, **named: Any) -> Any:
        def write(folder: Any) -> Any:
            return save(sharded_state_dict, folder, *given, **named)

        if not _writers or not _writers[-1].covers(checkpoint_dir):
            return write(checkpoint_dir)
        return _writers[-1].write(write, Path(checkpoint_dir), _keep_hf_files)

    save_checkpoint = resolve(_SAVE_CHECKPOINT)

    @wraps(save_checkpoint)
    def begun(iteration: int, *given: Any, **named: Any) -> Any:
        if _writers:
            _writers[-1].begin(iteration)
        return save_checkpoint(iteration, *given, **named)

    write_file = resolve(_WRITER)

    @wraps(write_file)
    def file_named(
        transforms: Any, local_proc_idx: int, write_bucket: Any, results_queue: Any, *given: Any, **named: Any
    ) -> Any:
        found = write_file(transforms, local_proc_idx, write_bucket, results_queue, *given, **named)
        if isinstance(found[1], OSError):
            found[1].filename = str(write_bucket[0])  # an error of writing, unlike that of opening, has none
            if (
                results_queue is None
            ):  # Megatron keeps of what is returned the type alone, of what is raised the text
                raise found[1]
        return found

    from megasched.trainer.checkpoint.one_writer import Storage

    storage = Storage(
        resolve(_STORAGE), Path(resolve(_TRACKER)("")).name, lambda: _writers[-1] if _writers else None
    )
    undos = [
        call_after(_PRETRAIN, _release, rebind=("megatron", "megasched")),
        set_attribute(_SETUP, claimed),
        set_attribute(_SAVE_CHECKPOINT, begun),
        set_attribute(_SAVE, written),
        set_attribute(_STORAGE, storage),
        set_attribute(_WRITER, staticmethod(file_named)),
    ]
    return lambda: undo_all(undos)


def _keep_hf_files(folder: Path) -> None:
    from megasched.trainer.checkpoint.source import keep_hf_files
    from megasched.trainer.session import get_session, has_session

    if has_session():  # else Megatron trains a model of its own
        session = get_session()
        keep_hf_files(folder, session.definition, session.hf_model, session.schedule)


def _release() -> None:
    while _writers:
        _writers.pop().release()


PATCH = Patch(
    name="one_writer",
    targets=(_PRETRAIN, _SETUP, _SAVE_CHECKPOINT, _SAVE, _STORAGE, _TRACKER, _WRITER),
    versions={"megatron-core": ">=0.19,<0.20"},
    why=(
        "megatron/training/checkpointing.py:1011 writes the tracker in place, and every checkpoint into its final "
        "folder; nothing keeps a run that a cluster has given up from writing over its successor's. Of an error "
        "while a file is written core/dist_checkpointing/strategies/filesystem_async.py:291 tells the type alone"
    ),
    change=_change,
    signature={_SAVE: ("sharded_state_dict", "checkpoint_dir"), _SAVE_CHECKPOINT: ("iteration",)},
)
