"""Wraps functions of a Megatron step to record it, only for the steps that are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

from megasched.attributes import Undo, undo_all, wrap_attribute
from megasched.trace.recorder import Recorder

FORWARD = "megatron.core.pipeline_parallel.schedules:forward_step"
BACKWARD = "megatron.core.pipeline_parallel.schedules:backward_step"
COMMUNICATE = "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate"


@contextmanager
def listening(recorder: Recorder, optimizer: Any, config: Any) -> Iterator[None]:
    """Runs its body and records what Megatron does in it.

    Args:
        optimizer: the optimizer that ``train_step`` steps.
        config: config of the model; its ``finalize_model_grads_func`` is called once a step.
    """
    undos = [
        wrap_attribute(FORWARD, partial(_forward, recorder)),
        wrap_attribute(BACKWARD, partial(_backward, recorder)),
        wrap_attribute(COMMUNICATE, partial(_communicate, recorder)),
        _wrap_member(recorder, optimizer, "step", "optimizer", "optimizer step"),
    ]
    if config.finalize_model_grads_func is not None:
        undos.append(
            _wrap_member(recorder, config, "finalize_model_grads_func", "communication", "finalize gradients")
        )
    try:
        yield
    finally:
        undo_all(undos)


def _forward(recorder: Recorder, forward_step: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
    microbatch, chunk = named.get("current_microbatch"), named.get("vp_stage") or 0
    with recorder.span("forward", microbatch, chunk):
        result = forward_step(*args, **named)
    recorder.remember(result[0], microbatch, chunk)
    return result


def _backward(
    recorder: Recorder,
    backward_step: Callable[..., Any],
    input_tensor: Any,
    output_tensor: Any,
    *args: Any,
    **named: Any,
) -> Any:
    with recorder.span("backward", *recorder.recall(output_tensor)):
        return backward_step(input_tensor, output_tensor, *args, **named)


def _communicate(recorder: Recorder, communicate: Callable[..., Any], self: Any, **named: Any) -> Any:
    what = _sent(**named)
    if not what:
        return communicate(self, **named)
    with recorder.span("communication", name=what):
        received, gradient, requests = communicate(self, **named)
    # With --overlap-p2p-communication the schedule waits later, by these.
    if not named.get("wait_on_reqs", True) and isinstance(requests, dict):
        requests = {name: _Awaited(request, name, recorder) for name, request in requests.items()}
    return received, gradient, requests


def _sent(*, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool, **_named: Any) -> str:
    """Describes a call as in ``send forward, receive backward``; empty where a call has nothing to do."""
    done = {
        "send forward": tensor_send_next is not None,
        "receive forward": recv_prev,
        "send backward": tensor_send_prev is not None,
        "receive backward": recv_next,
    }
    return ", ".join(name for name, holds in done.items() if holds)


class _Awaited:
    """Wraps a request that is still under way, and records the wait for it."""

    def __init__(self, request: Any, name: str, recorder: Recorder) -> None:
        self._request, self._name, self._recorder = request, name, recorder

    def wait(self, *args: Any, **named: Any) -> Any:
        with self._recorder.span("communication", name=f"wait for {self._name}"):
            return self._request.wait(*args, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def _wrap_member(recorder: Recorder, owner: Any, member: str, kind: Any, name: str) -> Undo:
    """Replaces the function ``owner.member``, on this one object, by one that is recorded; returns the undo."""
    function = getattr(owner, member)
    own = vars(owner).get(member)

    @wraps(function)
    def recorded(*args: Any, **named: Any) -> Any:
        with recorder.span(kind, name=name):
            return function(*args, **named)

    setattr(owner, member, recorded)
    return lambda: delattr(owner, member) if own is None else setattr(owner, member, own)
