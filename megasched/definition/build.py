"""Builds the unmodified definition from an HF model folder or config, with its parameters on the meta device."""

from __future__ import annotations

import copy
import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast
from weakref import WeakKeyDictionary

from megasched.attributes import replaced
from megasched.definition.code_state.random_states import seeded
from megasched.definition.config_check import config_fault, refuse_odd_config
from megasched.definition.objectives import CAUSAL_LM, Objective, set_objective
from megasched.definition.overrides import with_overrides
from megasched.errors import ConfigError, MegaschedError
from megasched.reading.hf_source import check_hf_model
from megasched.versions import warning_of

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel


@cache
def check_transformers() -> None:
    """Checks the version of transformers: definitions change with releases, and only a known range is tested.

    Of a newer one it warns; whether a run goes on with it is asked before (``--allow-unverified``).

    Raises:
        ConfigError: the installed version is older than the tested ones.
    """
    warning = warning_of("transformers", version("transformers"), allow_unverified=True)
    if warning:
        warnings.warn(warning, stacklevel=2)


LARGE = 2**30  # bytes
# Model -> each config in it with its ``use_cache``, which a build for training has switched off.
_use_cache: WeakKeyDictionary[nn.Module, list[tuple[Any, Any]]] = WeakKeyDictionary()
_GIVEN = ("device", "out", "layout")  # arguments of a factory by which its tensor is no new one on the CPU
# What transformers says of a model with code that it may not run, and of a config that no class is registered for.
_OF_CODE, _OF_NO_CLASS = "trust_remote_code=True", "Unrecognized configuration class"
_HAS_CODE = "the model has Python code of its own; read it, and run it with --trust-remote-code"
_INITIALISERS = ("torch.nn.init", "transformers.initialization")  # change their first argument, and return it


@contextmanager
def init_empty_weights(enable: bool = True, include_buffers: bool = False) -> Iterator[None]:
    """Runs its body so that modules constructed in it have their parameters on the meta device; buffers stay real.

    Args:
        enable: defer the weights; otherwise the body runs as it would without this.
        include_buffers: put buffers on the meta device, too, when they are registered. Nothing computes them
            afterwards: such a model can be looked at and scheduled, not run, and not filled by ``materialize``.

    Each parameter is moved when it is registered, before its initialisation runs, so that no memory of its size is
    ever touched, and its initialisation is skipped. Buffers (rotary frequencies and the like) are computed by the
    class, so that they need not be rebuilt afterwards. A parameter registered at two places stays one. What may
    become a parameter (``torch.empty``, ``torch.zeros``) is on meta at once above ``LARGE`` bytes: all experts
    of a layer are one tensor, of 28 GiB in DeepSeek-V3, for which memory may not suffice. Buffers of that size,
    and tables (``torch.ones``), are refused: no model has one.

    Raises:
        ConfigError: the body makes such a buffer or table.
    """
    from torch.utils.weak import WeakIdKeyDictionary

    if not enable:
        yield
        return
    large: Any = WeakIdKeyDictionary()  # tensor on meta -> the large one of which it is made

    def on_meta(buffer: torch.Tensor) -> torch.Tensor:
        return buffer.to("meta")

    def small(buffer: torch.Tensor) -> torch.Tensor:
        return _refuse_buffer(large[buffer]) if buffer in large else buffer

    buffers = _buffers_through(on_meta if include_buffers else small)
    with _parameters_on_meta(), _large_on_meta(large), buffers:
        yield


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Runs its body so that parameters are on the meta device from their registration on."""
    import torch
    from torch.utils.weak import WeakIdKeyDictionary

    register = torch.nn.Module.register_parameter
    moved: Any = WeakIdKeyDictionary()  # what a class holds on to, it may register again

    def register_on_meta(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        register(module, name, param)
        held = module._parameters[name]
        if held is not None and held.device.type != "meta":
            if held not in moved:
                moved[held] = torch.nn.Parameter(held.detach().to("meta"), requires_grad=held.requires_grad)
                moved[held].__dict__.update(held.__dict__)
            module._parameters[name] = moved[held]

    with replaced(torch.nn.Module, "register_parameter", register_on_meta):
        yield


def _large_on_meta(large: Any) -> Any:
    """Returns a mode in which large tensors are on meta at once, and what is on meta is not initialised.

    Args:
        large: gets these tensors and what is made of them, each with the large tensor of which it is made.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    of_parameters = {torch.empty, torch.zeros}
    tables = {torch.arange, torch.ones, torch.full, torch.linspace, torch.rand, torch.randn, torch.eye}

    class OnMeta(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            given = (*args, *kwargs.values())
            initialises = getattr(func, "__module__", None) in _INITIALISERS
            if initialises and isinstance(given[0], torch.Tensor) and given[0].is_meta:
                return given[0]
            if func in of_parameters | tables and not any(kwargs.get(name) is not None for name in _GIVEN):
                shape = func(*args, **{**kwargs, "device": "meta"})
                if shape.nbytes > LARGE:
                    large[shape] = shape if func in of_parameters else _refuse_buffer(shape)
                    return shape
            made = func(*args, **kwargs)
            of = [large[tensor] for tensor in given if isinstance(tensor, torch.Tensor) and tensor in large]
            if of and isinstance(made, torch.Tensor):
                large[made] = of[0]
            return made

    return OnMeta()


def _refuse_buffer(buffer: torch.Tensor) -> NoReturn:
    what = f"a buffer of {list(buffer.shape)}, {buffer.nbytes / 2**30:.1f} GiB"
    raise ConfigError(f"the config makes {what}; no model has one so large")


@contextmanager
def _buffers_through(kept: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Runs its body so that a module that registers a buffer keeps what a function makes of it."""
    import torch

    register = torch.nn.Module.register_buffer

    def register_kept(
        module: torch.nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True
    ) -> None:
        register(module, name, tensor if tensor is None else kept(tensor), persistent)

    with replaced(torch.nn.Module, "register_buffer", register_kept):
        yield


def load_config(
    hf_model: str | Path, overrides: Sequence[str] = (), *, trust_remote_code: bool = False
) -> PretrainedConfig:
    """Returns the HF config of a folder, a ``config.json`` file or a hub id, with ``key=value`` overrides applied.

    Args:
        hf_model: folder that holds ``config.json``, that file itself, or a hub id.
        overrides: ``key=value`` strings, applied as if they stood in the file; values are JSON where they parse as
            JSON, text otherwise; nested fields are written with dots (``text_config.hidden_size=64``).
        trust_remote_code: run Python code that comes with the model; off unless the user asks for it.

    Raises:
        ConfigError: the folder has no config, it can't be read, an override names no field of it, changes nothing
            or does not fit, or the installed transformers is not supported.
    """
    check_transformers()
    from transformers import AutoConfig, PretrainedConfig

    path = Path(hf_model)
    there, is_folder = os.path.lexists(path), os.path.isdir(path)
    if is_folder and not os.path.lexists(path / "config.json"):
        raise ConfigError(f"--hf-model {hf_model}: the folder has no config.json")
    check_hf_model(str(hf_model))
    if there:
        refuse_odd_config(path / "config.json" if is_folder else path)
    try:
        config = AutoConfig.from_pretrained(str(hf_model), trust_remote_code=trust_remote_code)
    except Exception as error:  # each class validates in its own way
        if not trust_remote_code and _OF_CODE in str(error):
            raise ConfigError(f"--hf-model {hf_model}: {_HAS_CODE}") from error
        raise ConfigError(
            f"--hf-model {hf_model}: can't load the HF config: {config_fault(path, error)}"
        ) from error
    if not overrides:
        return cast("PretrainedConfig", config)
    file, _ = PretrainedConfig.get_config_dict(str(hf_model))
    return with_overrides(config, file, overrides)


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """Returns a copy of the decoder's part of a config; sizes that differ by layer give the one for all layers."""
    text = copy.deepcopy(config.get_text_config(decoder=True))
    if getattr(text, "is_heterogeneous", False):
        # Megatron has one number for each size, for its bookkeeping.
        text.allow_global_per_layer_attribute_access = True
    return text


def build_definition(
    config: PretrainedConfig, objective: Objective = CAUSAL_LM, *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Returns the HF model of a config: stock class, parameters on meta (float32), buffers real.

    Args:
        objective: training task, which decides the class.

    Raises:
        ConfigError: transformers has no such model, or lacks a package for it.
    """
    import torch
    import transformers

    auto_class = getattr(transformers, objective.auto_class)
    with seeded(0), init_empty_weights():  # what a class draws for its attributes and buffers, all ranks have
        try:
            model = auto_class.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
        except ImportError as error:  # transformers says which package, and how to install it
            reason = " ".join(str(error).split())
            raise ConfigError(f"transformers can't make this {objective.model}: {reason}") from error
        except MegaschedError:
            raise
        except Exception as error:  # a size or a value that some module in it does not take
            if not trust_remote_code and _OF_CODE in str(error):
                raise ConfigError(_HAS_CODE) from error
            if _OF_NO_CLASS in str(error):
                reason = str(error).partition("\n")[0]  # all that there are follow
                raise ConfigError(f"transformers has no {objective.model} for this config: {reason}") from error
            reason = f"{type(error).__name__}: {' '.join(str(error).split()):.600}"
            what = f"the class of {type(config).__name__} can't be made of this config"
            raise ConfigError(f"{what}: {reason} ({_place(error)})") from error
    switch_cache_off(model)
    set_objective(model, objective)
    buffers_following_dtype(model)  # notes them, while the model is as its class makes it
    return cast("PreTrainedModel", model)


def input_embedding(definition: Any) -> nn.Module | None:
    """Returns the embedding of tokens of an HF definition; None where its class names none."""
    with suppress(NotImplementedError):  # by which HF says that it is not under one of the usual names
        return cast("nn.Module | None", definition.get_input_embeddings())
    return None


def switch_cache_off(model: nn.Module) -> list[tuple[Any, Any]]:
    """Has the HF models in a module keep no cache, which is for generation; returns what their configs said.

    The stacks of an encoder-decoder, and the text model beside an image encoder, have configs of their own.
    """
    configs = {
        id(found): found for module in model.modules() if (found := getattr(module, "config", None)) is not None
    }
    said = [(config, config.use_cache) for config in configs.values() if hasattr(config, "use_cache")]
    for config, _ in said:
        config.use_cache = False
    return said


def keep_no_cache(model: nn.Module) -> None:
    """Has a model keep no cache, and notes what its configs said of that."""
    said = switch_cache_off(model)
    _use_cache.setdefault(model, said)


@contextmanager
def original_cache(model: nn.Module) -> Iterator[None]:
    """Runs its body with the configs of a model as they were before ``keep_no_cache``."""
    said = _use_cache.get(model, [])
    now = [(config, config.use_cache) for config, _ in said]
    _say(said)
    try:
        yield
    finally:
        _say(now)


def _say(use_cache: list[tuple[Any, Any]]) -> None:
    for config, value in use_cache:
        config.use_cache = value


def _place(error: Exception) -> str:
    """Returns the ``file:line`` that raised the error."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"


def kept_in_float32(definition: PreTrainedModel, dtype: torch.dtype, names: Iterable[str]) -> frozenset[str]:
    """Returns the parameters and buffers that transformers keeps in float32 when it loads a model in ``dtype``.

    In half precision they would change the model: the correction of a router's choice, the decay of a state.
    ``PreTrainedModel._keep_in_fp32_modules_strict`` names them, and ``_keep_in_fp32_modules`` those for which only
    float16 is too narrow; a pattern may match anywhere in a name (transformers/core_model_loading.py,
    ``convert_and_load_state_dict_in_model``).
    """
    import torch

    patterns: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        patterns |= set(getattr(definition, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        patterns |= set(getattr(definition, "_keep_in_fp32_modules", None) or ())
    found = [re.compile(pattern.replace("*", ".*")) for pattern in patterns]
    return frozenset(name for name in names if any(pattern.search(name) for pattern in found))


# Says on a definition which of its buffers transformers makes in the dtype in which it loads the model.
_FOLLOWING = "_megasched_buffers_following_dtype"


def buffers_following_dtype(definition: nn.Module) -> frozenset[str]:
    """Returns the non-persistent buffers that have the dtype in which transformers loads a model.

    Examples are Gemma's scale of the embedding and GPT's mask. Rotary frequencies are always float32.
    """
    if not hasattr(definition, _FOLLOWING):
        setattr(definition, _FOLLOWING, _follow_dtype(definition))
    found: frozenset[str] = getattr(definition, _FOLLOWING)
    return found


def _follow_dtype(model: nn.Module) -> frozenset[str]:
    """Finds these buffers with a second model in another dtype.

    Building it takes time, so it is skipped if all float32 buffers are rotary frequencies.
    """
    import torch

    asked = [
        name
        for name, module, own in _buffers(model)
        if own in module._non_persistent_buffers_set
        and module.get_buffer(own).dtype == torch.float32
        and not own.endswith("inv_freq")
    ]
    make = getattr(type(model), "_from_config", None)
    if not asked or make is None:
        return frozenset()
    with seeded(0), init_empty_weights():
        try:
            other = make(copy.deepcopy(model.config), dtype=torch.bfloat16)
        except Exception:  # of whatever kind: a class that can't be made in it has none
            return frozenset()
    made = dict(other.named_buffers())
    return frozenset(name for name in asked if name in made and made[name].dtype == torch.bfloat16)


def cast_as_loaded(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts a copy of a definition to the dtypes that it has in a run with parameters in ``dtype``.

    Args:
        model: may have been cast before.
    """
    following = buffers_following_dtype(model)
    parameters = dict(model.named_parameters())
    buffers = {
        name: (module, own)
        for name, module, own in _buffers(model)
        if name in following or own not in module._non_persistent_buffers_set
    }
    kept = kept_in_float32(cast("PreTrainedModel", model), dtype, [*parameters, *buffers])
    for name in parameters.keys() - kept:
        parameters[name].data = parameters[name].data.to(dtype)
    for module, own in (buffers[name] for name in buffers.keys() - kept):
        module._buffers[own] = module.get_buffer(own).to(dtype)


def _buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yields each floating-point buffer's full name, its module, and its name in that module."""
    for path, module in model.named_modules():
        for own, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                yield f"{path}.{own}".lstrip("."), module, own
