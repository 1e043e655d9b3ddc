"""Defines the stand-ins that host_cuda puts in CUDA's place; each serves one or more rows of its table."""

from __future__ import annotations

import contextlib
import inspect
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

CPU = torch.device("cpu")

# Reported for each emulated device. Compute capability 9.0 keeps Megatron on its ordinary code paths.
CAPABILITY = (9, 0)
MEMORY_BYTES = 80 * 2**30


def host_device(device: Any) -> Any:
    """Returns the device to use instead of ``device``: the CPU for any form of CUDA, or ``device`` (meta)."""
    if isinstance(device, int) and not isinstance(device, bool):
        return CPU
    if isinstance(device, str) and device.partition(":")[0] == "cuda":
        return CPU
    if isinstance(device, torch.device) and device.type == "cuda":
        return CPU
    return device


class DeviceRewriting(TorchFunctionMode):
    """Rewrites CUDA devices in calls of torch functions; per thread, as every TorchFunctionMode is."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not kwargs and func is not torch.Tensor.to:  # nearly all of them
            return func(*args)
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = host_device(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], host_device(args[1]), *args[2:])
        return func(*args, **kwargs)


@contextlib.contextmanager
def device_rewriting() -> Iterator[None]:
    """Runs its body with device rewriting, which is entered only where it is not in force already."""
    if any(isinstance(mode, DeviceRewriting) for mode in _get_current_function_mode_stack()):
        yield
    else:
        with DeviceRewriting():
            yield


# --- device queries


class _Devices:
    current: int | None = None


def always_true(*args: Any, **kwargs: Any) -> bool:
    return True


def always_false(*args: Any, **kwargs: Any) -> bool:
    return False


def nothing(*args: Any, **kwargs: Any) -> None:
    return None


def zero(*args: Any, **kwargs: Any) -> int:
    return 0


def device_count() -> int:
    """Returns one device per local rank, as on a node where every rank has its GPU."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)


def current_device() -> int:
    """Returns the device that ``set_device`` chose, and before that the local rank's own."""
    return int(os.environ.get("LOCAL_RANK") or 0) if _Devices.current is None else _Devices.current


def set_device(device: Any) -> None:
    index = device if isinstance(device, int) else torch.device(device).index
    if index is not None and index >= 0:
        _Devices.current = index


class DeviceContext(contextlib.nullcontext):
    """Stands in for ``torch.cuda.device``."""

    def __init__(self, device: Any = None) -> None:
        super().__init__()


class DeviceProperties(NamedTuple):
    name: str = "host CPU (rehearsal)"
    major: int = CAPABILITY[0]
    minor: int = CAPABILITY[1]
    total_memory: int = MEMORY_BYTES
    multi_processor_count: int = 1


def get_device_properties(device: Any = None) -> DeviceProperties:
    return DeviceProperties()


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return CAPABILITY


def get_device_name(device: Any = None) -> str:
    return DeviceProperties().name


# --- streams and events: everything runs at once and in order, so that there is nothing to wait for


class Stream:
    cuda_stream = 0
    device = CPU
    priority = 0

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.priority = priority

    def wait_stream(self, stream: Any) -> None:
        return None

    def wait_event(self, event: Any) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: Any) -> None:
        return None


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._seconds = 0.0

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Returns the time between two events in milliseconds, as CUDA's does."""
        return 1e3 * (end_event._seconds - self._seconds)


_THE_STREAM = Stream()


def current_stream(device: Any = None) -> Stream:
    return _THE_STREAM


def stream_context(stream: Any) -> contextlib.nullcontext:
    return contextlib.nullcontext(stream)


# --- random numbers: the CPU's default generator is the device's too


def get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [torch.get_rng_state() for _ in range(device_count())]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    torch.set_rng_state(new_states[current_device()])


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def initial_seed() -> int:
    return torch.initial_seed()


class DefaultGenerators:
    """Stands in for ``torch.cuda.default_generators``: the same generator for each device."""

    def __getitem__(self, index: int) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return device_count()


DEFAULT_GENERATORS = DefaultGenerators()


def call_now(function: Callable[[], Any], **kwargs: Any) -> None:
    """Stands in for ``torch.cuda._lazy_call``, which waits for CUDA to be initialised."""
    function()


# --- memory statistics


def memory_stats(device: Any = None) -> dict[str, int]:
    return defaultdict(int)


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return MEMORY_BYTES, MEMORY_BYTES


# --- autocast: CUDA's and the CPU's are one

_autocast_enabled, _set_autocast_enabled = torch.is_autocast_enabled, torch.set_autocast_enabled
_autocast_dtype, _set_autocast_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype


def is_autocast_enabled(device_type: str = "cuda") -> bool:
    return _autocast_enabled(_type_of(device_type))


def set_autocast_enabled(*args: Any) -> None:
    """Takes a device type and whether it is on; that alone is for CUDA."""
    device_type, enabled = args if len(args) == 2 else ("cuda", *args)
    _set_autocast_enabled(_type_of(device_type), enabled)


def get_autocast_dtype(device_type: str) -> torch.dtype:
    return _autocast_dtype(_type_of(device_type))


def set_autocast_dtype(device_type: str, dtype: torch.dtype) -> None:
    _set_autocast_dtype(_type_of(device_type), dtype)


def _type_of(device_type: str) -> str:
    return "cpu" if device_type == "cuda" else device_type


# --- tensors

_tensor_type = torch.Tensor.type


def tensor_cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
    """Returns the tensor itself, as for one that is on the device already; torch refuses meta tensors."""
    return self.to(CPU, **kwargs)


def tensor_pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    return self


def tensor_type(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    """Returns a type name such as ``torch.cuda.FloatTensor``, which Megatron's optimizers compare, or converts."""
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.")
    # A TorchFunctionMode gets methods by their name on torch.Tensor: it would come back here.
    with torch._C.DisableTorchFunction():
        result = _tensor_type(self, dtype, non_blocking, **kwargs)
    if isinstance(result, str) and self.device.type == "cpu":
        return result.replace("torch.", "torch.cuda.", 1)
    return result


# --- the rest

_dataloader_init = torch.utils.data.DataLoader.__init__
_dataloader_signature = inspect.signature(_dataloader_init)
_engine_run_backward = torch.autograd._engine_run_backward


def dataloader_init(self: Any, *args: Any, **kwargs: Any) -> None:
    """Initialises a data loader without pinned memory and with its own generator unless one is given.

    An iterator draws a base seed from the CPU's default generator. Not every rank makes one, and in a rehearsal
    that generator is the device's, whose state must stay equal over a TP group (replicated dropout).
    """
    bound = _dataloader_signature.bind(self, *args, **kwargs)
    bound.arguments["pin_memory"] = False
    if bound.arguments.get("generator") is None:
        bound.arguments["generator"] = torch.Generator().manual_seed(torch.initial_seed())
    _dataloader_init(*bound.args, **bound.kwargs)


def run_backward(*args: Any, **kwargs: Any) -> Any:
    """Runs autograd with device rewriting on, as custom backwards need; ``backward`` switches all modes off."""
    with device_rewriting():
        return _engine_run_backward(*args, **kwargs)


def counts_to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Stands in for ``maybe_move_tensor_to_cpu``: returns a tensor as numpy if asked, other values unchanged."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def output_kept(self: Any, run_function: Callable[..., Any], *args: Any) -> Any:
    """Stands in for ``CheckpointWithoutOutput.checkpoint``: the same numbers, whose memory nothing takes back."""
    return run_function(*args)


def forked_saver(self: Any) -> Any:
    """Stands in for ``_get_async_caller``: returns what forks this process for one save."""
    from megatron.core.dist_checkpointing.strategies.async_utils import TemporalAsyncCaller

    return TemporalAsyncCaller()
