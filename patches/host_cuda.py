"""Emulates on the CPU the CUDA that Megatron's trainer touches, for rehearsals.

With it the real trainer, its schedules, its distributed optimizer and its checkpoints run on gloo on a
machine without a GPU. Nothing happens at import; ``install`` is called when a rehearsal was asked for
(``--rehearse``, ``MEGASCHED_REHEARSE=1``), before Megatron is imported where that can be arranged.

Besides the table ``SURFACES`` below, ``install`` sets up:

* environment: ``CUDA_DEVICE_MAX_CONNECTIONS=1``, which ``megatron/training/arguments.py:1413`` demands
  for TP and CP; ``TORCHDYNAMO_DISABLE=1``, because Megatron's ``jit_fuser`` is bound to ``torch.compile``
  when it is imported (``megatron/core/jit.py``): compiled, the fused functions (MoE's router among them)
  give the same losses, but each rank needs a C++ compiler and its time. A value that the user has set
  is kept.
* a ``TorchFunctionMode`` in the calling thread that rewrites ``device=`` (and ``Tensor.to``'s positional
  device) from any form of CUDA, an index included, to the CPU; ``meta`` stays ``meta``. Threads that are
  started later do not inherit it; autograd's backward does, in any thread.
* silence for one warning of ``megatron/core/tensor_parallel/random.py:333``: it reports that the CPU's
  random state moved while the device's was forked, and in a rehearsal the two are one.

It does not simulate memory, speed or health (all such figures are 0), NCCL, CUDA graphs or Transformer Engine.
A function that is missing from the table raises torch's own error. A tensor "moved" to the device is the same
tensor, not a copy.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import NamedTuple

from megasched.attributes import Undo, set_attributes
from megasched.errors import ConfigError
from megasched.patches import registry
from megasched.patches.registry import Patch
from megasched.versions import TESTED


class Surface(NamedTuple):
    """Maps one emulated target, ``module:attr``, to the name of its stand-in in ``host_cuda_emulation``."""

    target: str
    emulation: str


_SAVES = "megatron.core.dist_checkpointing.strategies.async_utils"
_OUTPUT_RECOMPUTED = "megatron.core.tensor_parallel.random:CheckpointWithoutOutput"
SURFACES: dict[str, tuple[Surface, ...]] = {
    "device queries": (
        Surface("torch.cuda:is_available", "always_true"),
        Surface("torch.cuda:is_bf16_supported", "always_true"),
        Surface("torch.cuda:device_count", "device_count"),
        Surface("torch.cuda:current_device", "current_device"),
        Surface("torch.cuda:set_device", "set_device"),
        Surface("torch.cuda:device", "DeviceContext"),
        Surface("torch.cuda:get_device_properties", "get_device_properties"),
        Surface("torch.cuda:get_device_capability", "get_device_capability"),
        Surface("torch.cuda:get_device_name", "get_device_name"),
    ),
    # torch's device-neutral API tells the truth; with it torch.utils.checkpoint and the optimizers' check for
    # graph capture (Optimizer._accelerator_graph_capture_health_check) take their CPU paths.
    "accelerator queries": (
        Surface("torch.accelerator:is_available", "always_false"),
        Surface("torch.accelerator:current_accelerator", "nothing"),
    ),
    "streams and events": (
        Surface("torch.cuda:Stream", "Stream"),
        Surface("torch.cuda:Event", "Event"),
        Surface("torch.cuda:current_stream", "current_stream"),
        Surface("torch.cuda:default_stream", "current_stream"),
        Surface("torch.cuda:stream", "stream_context"),
        Surface("torch.cuda:set_stream", "nothing"),
        Surface("torch.cuda:synchronize", "nothing"),
        Surface("torch.cuda:is_current_stream_capturing", "always_false"),
        Surface("torch:Tensor.record_stream", "nothing"),
    ),
    "profiler ranges": (
        Surface("torch.cuda.nvtx:range_push", "zero"),
        Surface("torch.cuda.nvtx:range_pop", "zero"),
        Surface("torch.cuda.nvtx:mark", "nothing"),
    ),
    "random numbers": (
        Surface("torch.cuda:default_generators", "DEFAULT_GENERATORS"),
        Surface("torch.cuda:initial_seed", "initial_seed"),
        Surface("torch.cuda:manual_seed", "manual_seed"),
        Surface("torch.cuda:manual_seed_all", "manual_seed"),
        Surface("torch.cuda:get_rng_state", "get_rng_state"),
        Surface("torch.cuda:set_rng_state", "set_rng_state"),
        Surface("torch.cuda:get_rng_state_all", "get_rng_state_all"),
        Surface("torch.cuda:set_rng_state_all", "set_rng_state_all"),
        Surface("torch.cuda.random:get_rng_state", "get_rng_state"),
        Surface("torch.cuda.random:set_rng_state", "set_rng_state"),
        Surface("torch.cuda:_lazy_call", "call_now"),
    ),
    "memory statistics": (
        Surface("torch.cuda:memory_allocated", "zero"),
        Surface("torch.cuda:max_memory_allocated", "zero"),
        Surface("torch.cuda:memory_reserved", "zero"),
        Surface("torch.cuda:max_memory_reserved", "zero"),
        Surface("torch.cuda:device_memory_used", "zero"),
        Surface("torch.cuda:memory_stats", "memory_stats"),
        Surface("torch.cuda:mem_get_info", "mem_get_info"),
        Surface("torch.cuda:reset_peak_memory_stats", "nothing"),
        Surface("torch.cuda:empty_cache", "nothing"),
    ),
    # StragglerDetector (megatron/core/utils.py:1717) reports them; torch asks NVIDIA's library.
    "temperature and power": (
        Surface("torch.cuda:temperature", "zero"),
        Surface("torch.cuda:power_draw", "zero"),
        Surface("torch.cuda:utilization", "zero"),
        Surface("torch.cuda:clock_rate", "zero"),
    ),
    # Module.cuda and Module.to end in these and in the rewriting of Tensor.to.
    "tensor movement": (
        Surface("torch:Tensor.cuda", "tensor_cuda"),
        Surface("torch:Tensor.pin_memory", "tensor_pin_memory"),
    ),
    # megatron/core/optimizer/optimizer.py:690 and clip_grads.py:174 compare type names.
    "tensor type names": (Surface("torch:Tensor.type", "tensor_type"),),
    # Autocast of CUDA is that of the CPU: torch.amp.custom_bwd, around Megatron's linears, restores it for CUDA.
    "autocast": (
        Surface("torch:is_autocast_enabled", "is_autocast_enabled"),
        Surface("torch:set_autocast_enabled", "set_autocast_enabled"),
        Surface("torch:get_autocast_dtype", "get_autocast_dtype"),
        Surface("torch:set_autocast_dtype", "set_autocast_dtype"),
    ),
    "data loading": (Surface("torch.utils.data:DataLoader.__init__", "dataloader_init"),),
    "backward": (Surface("torch.autograd:_engine_run_backward", "run_backward"),),
    # Decides by Tensor.is_cuda whether token counts become the numpy arrays that all_to_all needs.
    "MoE token counts": (
        Surface("megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu", "counts_to_host"),
    ),
    # `--recompute-modules layernorm` and its like give an output's storage away and share another by compiled
    # code, and ask Transformer Engine for its fp8 state even where there is none (tensor_parallel/random.py:693).
    "recomputed outputs": (
        Surface(f"{_OUTPUT_RECOMPUTED}.checkpoint", "output_kept"),
        Surface(f"{_OUTPUT_RECOMPUTED}.discard_output_and_register_recompute", "nothing"),
    ),
    # The process that `--use-persistent-ckpt-worker` keeps is none of this emulation: each save forks one.
    "checkpoint worker": (
        Surface("megatron.training.initialize:init_persistent_async_worker", "nothing"),
        Surface(f"{_SAVES}:AsyncCallsQueue._get_async_caller", "forked_saver"),
    ),
    # Five rounds of full-size activations through every fused function, to warm up a compiler that is off.
    "jit warm-up": (Surface("megatron.training.initialize:_warmup_jit_function", "nothing"),),
}

ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCHDYNAMO_DISABLE": "1"}

_RNG_LOGGER = "megatron.core.tensor_parallel.random"


def install(*, force: bool = False) -> None:
    """Emulates CUDA in this process; a second call is a no-op.

    Args:
        force: go on although CUDA devices are present (they stay unused).

    Raises:
        ConfigError: CUDA devices are present and ``force`` is not given, or torch or Megatron is a version
            that the emulation is not for.
    """
    registry.apply(PATCH.name, force=force)


def turns_compiler_off() -> bool:
    """Returns whether an emulation in this process compiles nothing, as it does unless the environment says so."""
    return (ENVIRONMENT | os.environ)["TORCHDYNAMO_DISABLE"] == "1"


def is_installed() -> bool:
    """Returns whether CUDA is emulated in this process."""
    return PATCH.name in registry.active()


def _change(*, force: bool = False, quiet: bool = False) -> list[Undo]:
    _refuse_real_cuda(force)
    undos = [_set_environment()]
    from megasched.patches import host_cuda_emulation as emulation

    mode = emulation.DeviceRewriting()
    mode.__enter__()
    undos.append(lambda: mode.__exit__(None, None, None))
    stand_ins = {target: getattr(emulation, name) for surfaces in SURFACES.values() for target, name in surfaces}
    of_megatron = {target for target in stand_ins if target.startswith("megatron")}
    # torch's first: Megatron asks for CUDA where it is imported, and that is where its own targets are found.
    for targets in (stand_ins.keys() - of_megatron, of_megatron):
        undos.append(set_attributes({target: stand_ins[target] for target in targets}, rebind=("megatron",)))
    undos.append(_silence_shared_generator_warning())
    if not quiet and os.environ.get("RANK", "0") == "0":
        print(_banner(emulation.device_count()), file=sys.stderr, flush=True)
    return undos


def _refuse_real_cuda(force: bool) -> None:
    import torch

    if torch.cuda.is_available() and not force:
        raise ConfigError(
            f"a rehearsal was asked for, but this machine has CUDA: {torch.cuda.device_count()} device(s), "
            f"the first is {torch.cuda.get_device_name(0)}. Train without --rehearse, or say "
            "MEGASCHED_REHEARSE=force to rehearse on the CPU all the same"
        )


def _set_environment() -> Undo:
    absent = [key for key in ENVIRONMENT if key not in os.environ]
    before = dynamo_is_off()
    os.environ.update({key: ENVIRONMENT[key] for key in absent})
    # The variable is read when a function is handed to torch.compile, and those of Megatron may have been.
    _switch_dynamo(off=turns_compiler_off())

    def undo() -> None:
        for key in absent:
            os.environ.pop(key, None)
        _switch_dynamo(off=before)

    return undo


def dynamo_is_off() -> bool:
    """Returns ``torch._dynamo.config.disable``, or the value that it will have once it is imported."""
    config = sys.modules.get("torch._dynamo.config")
    return os.environ.get("TORCH_COMPILE_DISABLE") == "1" if config is None else config.disable


def _switch_dynamo(*, off: bool) -> None:
    if config := sys.modules.get("torch._dynamo.config"):
        config.disable = off


def _silence_shared_generator_warning() -> Undo:
    def keep(record: logging.LogRecord) -> bool:
        return "CPU RNG state changed within GPU RNG context" not in record.getMessage()

    logger = logging.getLogger(_RNG_LOGGER)
    logger.addFilter(keep)
    return lambda: logger.removeFilter(keep)


def _banner(devices: int) -> str:
    lines = (
        "REHEARSAL: no GPU is used. CUDA is emulated on the CPU by megasched,",
        f"{devices} device(s) a node. Losses and checkpoints are real;",
        "times and memory figures say nothing about a GPU.",
    )
    rule = "*" * 74
    return "\n".join([rule, *(f"* {line:<70} *" for line in lines), rule])


PATCH = Patch(
    name="host_cuda",
    targets=tuple(surface.target for surfaces in SURFACES.values() for surface in surfaces),
    versions={name: TESTED[name] for name in ("torch", "megatron-core")},
    why=(
        "rehearsal without a GPU: Megatron's trainer asserts CUDA (megatron/training/initialize.py:66) and "
        "calls it everywhere; emulated on the CPU, only when asked for"
    ),
    change=_change,
)
