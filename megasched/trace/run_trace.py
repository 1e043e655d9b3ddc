"""Decides which steps of a run ``--megasched-trace FILE`` records, and writes the file after them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megasched.errors import ConfigError
from megasched.trace.chrome_trace import RankCoordinates
from megasched.trace.clocks import host, start_clock
from megasched.trace.gather import RankSpans, gather, part_path, write_part
from megasched.trace.hooks import listening
from megasched.trace.recorder import Recorder

FLAG = "--megasched-trace"


def trace_conflicts(args: argparse.Namespace) -> list[str]:
    """Returns a line that says what is wrong with the iterations to be recorded; empty where nothing is."""
    if args.megasched_trace is None or args.profile_step_end > args.profile_step_start:
        return []
    return [
        f"{FLAG} records from --profile-step-start {args.profile_step_start} to --profile-step-end "
        f"{args.profile_step_end}, which is none: the end must be the larger"
    ]


class RunTrace:
    """Traces some steps of a run on this rank; on rank 0 it also makes the file of all ranks."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.file = args, Path(args.megasched_trace)
        self.start, self.stop = args.profile_step_start, args.profile_step_end
        self.recorder: Recorder | None = None
        self.barriers: list[float] = []
        self.done = False
        exits = args.exit_interval and (args.iteration // args.exit_interval + 1) * args.exit_interval
        # The run's last iteration; 0 where nobody knows it.
        self.last = min(filter(None, (args.train_iters, exits)), default=0)
        named = range(max(self.start, args.iteration), min(self.stop, self.last or self.stop))
        # The number of the last one that is recorded: Megatron passes over those of --iterations-to-skip.
        self.final = next((i + 1 for i in reversed(named) if i + 1 not in args.iterations_to_skip), None)
        if self.final is None:
            skipped = " without those of --iterations-to-skip" if args.iterations_to_skip else ""
            _say(
                f"{FLAG}: nothing will be recorded: this run makes the iterations {args.iteration + 1} to "
                f"{self.last}{skipped}, and --profile-step-start {self.start} --profile-step-end {self.stop} "
                f"names {self.start + 1} to {self.stop}"
            )
            self.done = True

    def step(self, train_step: Callable[[], Any], given: Mapping[str, Any]) -> Any:
        """Runs one step, and records it if it is among those to be recorded.

        Args:
            given: the arguments of Megatron's ``train_step`` by name.
        """
        iteration = given["iteration"]
        if self.done or not self.start <= iteration < self.stop:
            return train_step()
        if self.recorder is None:
            self._begin()
        assert self.recorder is not None
        self.recorder.iteration = iteration + 1
        with listening(self.recorder, given["optimizer"], given["config"]):
            result = train_step()
        if iteration + 1 == self.final:
            self.done = True
            self._finish()
        return result

    def _begin(self) -> None:
        import torch

        rank = torch.distributed.get_rank()
        # What an earlier run has left must not be taken for this one's; all ranks have done so at the barrier.
        try:
            part_path(self.file, rank).unlink(missing_ok=True)
        except OSError as error:
            _say(f"{FLAG}: {error}", rank)
        clock, self.barriers = start_clock()
        self.recorder = Recorder(rank, clock)

    def _finish(self) -> None:
        """Writes what was recorded; only prints an error, as a missing trace is no reason to end a run."""
        import torch

        assert self.recorder is not None
        rank, world_size = self.recorder.rank, torch.distributed.get_world_size()
        try:
            write_part(self.file, RankSpans(rank, _place(), host(), self.barriers, self.recorder.spans()))
            if rank == 0:
                missing = gather(self.file, world_size)
                if missing:
                    named = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
                    _say(f"{FLAG}: {len(missing)} of {world_size} ranks have written nothing: {named}")
                _say(f"{FLAG}: wrote {self.file}")
        except (OSError, ConfigError) as error:  # ConfigError: a part that something else has changed
            _say(f"{FLAG}: no trace from this rank: {error}", rank)
        self.recorder = None


def _place() -> RankCoordinates:
    from megatron.core import parallel_state

    return RankCoordinates(
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
    )


def _say(text: str, rank: int | None = None) -> None:
    """Prints to stderr; without a rank the text holds for all, and rank 0 alone prints it."""
    import torch

    if rank is not None or torch.distributed.get_rank() == 0:
        where = f" on rank {rank}" if rank else ""
        print(f"megasched{where}: {text}", file=sys.stderr, flush=True)
