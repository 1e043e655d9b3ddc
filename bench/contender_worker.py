"""One contender in a process of its own: builds it, then steps when it is told to, and idles otherwise."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import kernel_times
import machine
import memory
import trainer_side


def serve(channel: Connection, builder: str, schedule: str, setting: trainer_side.Setting) -> None:
    """Answers orders until the channel closes.

    Sends ``("built", None)``, and ``("ready", None)`` after the first steps, which it makes when it is told to
    begin; ``("failed", reason)`` instead of either. Then one dict for each order: ``("steps", n)`` gives
    ``seconds`` of n steps and their ``peak_bytes``, ``("emulation",)`` what the emulation of CUDA costs a step,
    ``("kernels",)`` those of a step.
    """
    try:
        args = trainer_side.start(setting, schedule)
        before = memory.allocated()
        side, data = trainer_side.build(args, builder), trainer_side.batches(setting)
        _release()
        channel.send(("built", None))
        channel.recv()
        side.step(data)  # compiles, allocates the optimizer's states
        side.step(data)
        _release()
    except EOFError:
        raise
    except Exception as error:
        channel.send(("failed", f"{type(error).__name__}: {first_reason(error)}"))
        raise
    channel.send(("ready", None))
    while True:
        order, *values = channel.recv()
        if order == "steps":
            channel.send(_steps(side, data, values[0], before))
        elif order == "kernels":
            channel.send(_kernels(side, data))
            _release()
        else:
            channel.send(_emulation(side, data) if setting.rehearse else {})


def first_reason(error: Exception) -> str:
    """The first line of what an error says that is more than a heading."""
    lines = [line.strip(" -") for line in str(error).splitlines()]
    return next((line for line in lines if line and not line.endswith(":")), "it said nothing")


def _steps(side: trainer_side.Side, data: Any, count: int, before: int) -> dict[str, Any]:
    """One step to warm up after the idling, then ``count`` timed ones."""
    side.step(data)
    memory.forget_peak()
    seconds = [side.step(data) for _ in range(count)]
    peak = memory.peak() - before
    _release()
    return {"seconds": seconds, "peak_bytes": peak}


def _kernels(side: trainer_side.Side, data: Any) -> dict[str, Any]:
    """The kernels of a step; why there are none, where the profiler fails: the times are measured already."""
    try:
        return kernel_times.measure(side, data)
    except RuntimeError as error:
        return {"why": first_reason(error)}


def _emulation(side: trainer_side.Side, data: Any) -> dict[str, Any]:
    """Calls that the emulation intercepts in one step, and the seconds that so many interceptions cost."""
    import torch

    from megasched.patches.host_cuda_emulation import DeviceRewriting

    real, calls = DeviceRewriting.__torch_function__, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return real(*args, **kwargs)

    DeviceRewriting.__torch_function__ = counted
    try:
        side.step(data)
    finally:
        DeviceRewriting.__torch_function__ = real

    x, rounds = torch.zeros(()), 2000

    def loop() -> float:
        start = time.perf_counter()
        for _ in range(rounds):
            torch.neg(x)
        return time.perf_counter() - start

    inside = min(loop() for _ in range(5))
    with _outside_emulation():
        outside = min(loop() for _ in range(5))
    return {"calls": calls, "seconds": calls * max(inside - outside, 0.0) / rounds}


@contextmanager
def _outside_emulation() -> Any:
    from torch.overrides import _pop_mode_temporarily

    with _pop_mode_temporarily():
        yield


def _release() -> None:
    """What the next contender's turn needs: the others share one GPU."""
    import torch

    if machine.on_gpu():
        torch.cuda.empty_cache()


def main() -> None:
    channel = Connection(int(sys.argv[1]))
    spec = json.loads(sys.argv[2])
    spec["setting"]["extra"] = tuple(spec["setting"]["extra"])
    try:
        serve(channel, spec["builder"], spec["schedule"], trainer_side.Setting(**spec["setting"]))
    except EOFError:
        pass
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)  # process groups wait for nobody


if __name__ == "__main__":
    main()
