"""Fixes checkpoints of the plain optimizer's state for a half-precision model with some parameters in float32.

megatron-core 0.19 numbers only the half-precision parameters when it writes or reads states, while the inner
optimizer numbers all: a float32 parameter takes another's state, or finds none (KeyError).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

from megasched.attributes import Undo, resolve, wrap_attribute
from megasched.errors import ConfigError
from megasched.patches.registry import Patch

_CLASS = "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params"
_SHARDED = f"{_CLASS}.sharded_state_dict"
_LOAD = f"{_CLASS}.load_state_dict"


def _change() -> list[Undo]:
    def patched_sharded_state_dict(real: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        with _float32_is_its_own_main(self):
            return real(self, *args, **kwargs)

    def patched_load_state_dict(real: Callable[..., None], self: Any, state_dict: dict[str, Any]) -> None:
        # --ckpt-format torch has the copies of half precision alone, in the order of these.
        saved = sum(len(group) for group in state_dict.get("fp32_from_fp16_params", ()))
        copies = sum(len(group) for group in getattr(self, "fp32_from_float16_groups", ()))
        with nullcontext() if saved == copies else _float32_is_its_own_main(self):
            real(self, state_dict)

    return [
        wrap_attribute(_SHARDED, patched_sharded_state_dict),
        wrap_attribute(_LOAD, patched_load_state_dict),
    ]


@contextmanager
def _float32_is_its_own_main(optimizer: Any) -> Iterator[None]:
    """Runs its body with all parameters listed in the inner optimizer's order, each with a main parameter."""
    if optimizer.is_stub_optimizer or not any(optimizer.fp32_from_fp32_groups):
        yield
        return
    before = optimizer.float16_groups, optimizer.fp32_from_float16_groups
    mains = [list(group["params"]) for group in optimizer.optimizer.param_groups]
    model = {
        id(main): param
        for params, copies in zip(*before, strict=True)
        for param, main in zip(params, copies, strict=True)
    }
    optimizer.float16_groups = [[model.get(id(main), main) for main in group] for group in mains]
    optimizer.fp32_from_float16_groups = mains
    try:
        yield
    finally:
        optimizer.float16_groups, optimizer.fp32_from_float16_groups = before


def _unneeded() -> str | None:
    if state_written_for() != "float32":
        return None
    return "Megatron numbers the parameters in float32, too"


def state_written_for() -> str:
    """Returns for which parameter the installed Megatron writes the state of one called ``float32``.

    Empty where it finds none.

    Raises:
        ConfigError: it does not take the optimizer that this version is known to have.
    """
    import torch
    from megatron.core.dist_checkpointing import ShardedTensor

    half, main, float32 = (torch.nn.Parameter(torch.zeros(1)) for _ in range(3))
    states = {number: {"exp_avg": torch.zeros(1)} for number in range(2)}
    optimizer = SimpleNamespace(
        is_stub_optimizer=False,
        float16_groups=[[half]],
        fp32_from_float16_groups=[[main]],
        fp32_from_fp32_groups=[[float32]],
        optimizer=SimpleNamespace(param_groups=[{"params": [float32, main]}]),
        state_dict=lambda: {
            "optimizer": {"state": states, "param_groups": [{"params": [0, 1]}]},
            "fp32_from_fp16_params": [[main]],
        },
        _extract_common_per_param_step=lambda state: None,
    )
    model = {
        name: ShardedTensor.from_rank_offsets(name, param)
        for name, param in (("half", half), ("float32", float32))
    }
    try:
        written = resolve(_SHARDED)(optimizer, model)
    except (KeyError, ValueError):  # it has none for the second number
        return ""
    except (AssertionError, AttributeError, IndexError, TypeError) as error:
        raise ConfigError(
            f"can't tell whether this Megatron writes optimizer states right: {_SHARDED} failed on two parameters "
            f"({type(error).__name__}: {error}). Versions known to work: {PATCH.version_range}"
        ) from error
    return str(written["optimizer"]["state"][0]["exp_avg"].key).rpartition(".")[2]


PATCH = Patch(
    name="float32_numbers",
    targets=(_SHARDED, _LOAD),
    why=(
        "megatron/core/optimizer/optimizer.py:1150 numbers float16_groups alone, and :1169 takes these numbers "
        "for those of the inner optimizer, which has the parameters of fp32_from_fp32_groups as well"
    ),
    change=_change,
    signature={
        _SHARDED: ("model_sharded_state_dict", "is_loading", "metadata"),
        _LOAD: ("state_dict",),
    },
    unneeded=_unneeded,
)
