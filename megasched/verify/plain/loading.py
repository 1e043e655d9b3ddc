"""Loads a model as a user of transformers does, for ``reference.py``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file


@dataclass
class Job:
    """Describes one run of the reference.

    Attributes:
        model: HF folder.
        weights: file of safetensors by the names of parameters; None for what ``from_pretrained`` reads.
        auto_class: class of transformers that loads the model, e.g. ``AutoModelForCausalLM``.
        predicts_next: whether a label is the token that comes next, so that the class may move labels by itself.
        dtype: dtype of the arithmetic: float32, float64 or bfloat16.
        rounded: weights and buffers are those of a model that transformers loads in bfloat16.
        draw: of ``nudge``; 0 leaves the weights as they are.
        look_step, look_batch: the micro-batch in which modules are watched; gradients are of that step.
        silent: switch dropouts off, also those that no config field sets.
        optimizer: lr, betas, eps, weight_decay, clip.
        adapters: path and scaling of each LoRA adapter; their weights are in ``adapters.safetensors``.
        unfrozen: modules that are trained besides the adapters.
    """

    model: str
    weights: str | None
    auto_class: str
    predicts_next: bool
    trust_remote_code: bool
    dtype: str
    rounded: bool
    look_step: int
    look_batch: int
    silent: bool
    optimizer: dict[str, Any]
    adapters: list[tuple[str, float]] = field(default_factory=list)
    unfrozen: list[str] = field(default_factory=list)
    draw: int = 0


def load_model(job: Job, folder: Path) -> Any:
    """Loads a model as a user of transformers does, in training mode."""
    dtype = torch.bfloat16 if job.rounded else torch.float32
    config = transformers.AutoConfig.from_pretrained(job.model, trust_remote_code=job.trust_remote_code)
    asked = getattr(config, "_attn_implementation", None)
    if asked not in (None, "eager", "sdpa"):  # a kernel for GPUs: the class's own choice
        config._attn_implementation = None
    options = {"config": config, "dtype": dtype, "trust_remote_code": job.trust_remote_code}
    auto_class = getattr(transformers, job.auto_class)
    with unfilled_memory_told():
        model, info = auto_class.from_pretrained(job.model, output_loading_info=True, **options)
    compute_buffers(model, auto_class, options)
    freeze_as_made(model, auto_class, options)
    if job.weights is not None:
        copy_weights(model, load_file(job.weights))
    elif info["missing_keys"]:
        raise RuntimeError(f"the folder lacks weights: {sorted(info['missing_keys'])[:8]}")
    without_cache(model)
    if job.adapters:
        adapt(model, job, load_file(folder / "adapters.safetensors"))
    nudge(model, job.draw)
    if job.rounded:
        widen(model, getattr(torch, job.dtype))
    elif job.dtype == "float64":
        model = model.double()
    if job.dtype == "float64":
        own_experts(model)
    return model.train()


def without_cache(model: Any) -> None:
    """Has a model and the models in it keep no cache, which is for generation."""
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = False


@contextmanager
def unfilled_memory_told() -> Iterator[None]:
    """Runs its body with torch filling new memory: with NaN, the largest integer, or True."""
    before, warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


def compute_buffers(model: Any, auto_class: Any, options: dict[str, Any]) -> None:
    """Gives buffers that transformers left unfilled the values that the constructor computes.

    It makes a model on meta, and then fills what files have and what ``_init_weights`` initialises; a table that a
    constructor computes has no values (modeling_utils.py, ``_move_missing_keys_from_meta_to_device``).
    """
    left = {name: buffer for name, buffer in model.named_buffers() if is_unfilled(buffer)}
    made = dict(auto_class.from_config(**options).named_buffers()) if left else {}
    for name, buffer in left.items():
        buffer.copy_(made[name])


def is_unfilled(buffer: torch.Tensor) -> bool:
    """Returns whether a buffer is as ``unfilled_memory_told`` fills it; one of flags may be meant to be so."""
    if buffer.is_floating_point() or buffer.is_complex():
        return bool(buffer.to(torch.complex64).isnan().all())
    return bool((buffer == (True if buffer.dtype == torch.bool else torch.iinfo(buffer.dtype).max)).all())


def freeze_as_made(model: Any, auto_class: Any, options: dict[str, Any]) -> None:
    """Freezes the parameters that the class makes frozen, because transformers trains whatever it has loaded."""
    with torch.device("meta"):
        made = dict(auto_class.from_config(**options).named_parameters())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(made[name].requires_grad)


def copy_weights(model: Any, values: dict[str, torch.Tensor]) -> None:
    """Copies every parameter from the file's values by its name, and the buffers that the file has."""
    held = dict(model.named_parameters())
    if missing := sorted(held.keys() - values.keys()):
        raise RuntimeError(f"the file of weights lacks {missing[:8]}")
    held |= {name: buffer for name, buffer in model.named_buffers() if name in values}
    with torch.no_grad():
        for name, tensor in held.items():
            tensor.copy_(values[name])


def nudge(model: Any, draw: int) -> None:
    """Changes each weight at random by what its dtype rounds, so that other roundings come of it.

    How far a step in float32 is from float64 is luck where large numbers cancel: one draw may be right to the last
    digit, and the next ten times as far off.

    Args:
        draw: seed; 0 changes nothing.
    """
    generator = torch.Generator().manual_seed(draw)
    for parameter in model.parameters() if draw else ():
        if parameter.is_floating_point():
            numbers = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.data *= 1 + torch.finfo(parameter.dtype).eps * numbers


def own_experts(model: Any) -> None:
    """Switches experts to the class's own loop, because torch's grouped product takes no float64."""
    with suppress(ValueError):  # of a class whose experts have no other
        model.set_experts_implementation("eager")


def widen(model: Any, dtype: torch.dtype) -> None:
    """Converts rounded values to the dtype of the arithmetic; float32 values stay in float32 at least."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, dtype))
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype == torch.bfloat16:
                module._buffers[name] = buffer.to(dtype)


def adapt(model: Any, job: Job, values: dict[str, torch.Tensor]) -> None:
    """Adds LoRA (arXiv 2106.09685), output + scaling * B(A(x)); freezes all but it and ``job.unfrozen``."""
    model.requires_grad_(False)
    for path in job.unfrozen:
        model.get_submodule(path).requires_grad_(True)
    for path, scaling in job.adapters:
        module = model.get_submodule(path)
        for name in ("lora_A", "lora_B"):
            value = values[f"{path}.{name}.weight"].to(module.weight.dtype)
            child = torch.nn.Linear(value.shape[1], value.shape[0], bias=False)
            child.weight = torch.nn.Parameter(value.clone())
            module.add_module(name, child)
        module.register_forward_hook(add_lora(scaling), with_kwargs=True)


def add_lora(scaling: float) -> Any:
    def add(module: Any, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor:
        given = args[0] if args else next(iter(kwargs.values()))
        return output + module.lora_B(module.lora_A(given)) * scaling

    return add
