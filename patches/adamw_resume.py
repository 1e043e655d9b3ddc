"""Fixes resuming the distributed optimizer when neither Transformer Engine nor NVIDIA apex provides Adam.

With torch's AdamW, megatron-core 0.19 can't resume from a torch_dist checkpoint, or resumes wrong:

* a fresh optimizer has no ``step`` yet, and ``state_dict`` asserts that there is one;
* the checkpoint keeps ``step`` once, in the parameter groups; the code that loads parameter states asks
  for it there too (KeyError in ``fully_reshardable``), or writes the fresh one over the loaded one
  (``dp_reshardable``);
* all parameters get the same ``step`` tensor, so that each in-place ``step += 1`` counts for all of them;
* on a pipeline stage without experts, the experts' optimizer has no parameters and so no ``step``, which
  ``state_dict`` asserts as well; and every rank loads the state that rank 0 saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megasched.attributes import Undo, wrap_attribute
from megasched.patches.registry import Patch

if TYPE_CHECKING:
    import torch

_MODULE = "megatron.core.optimizer.distrib_optimizer"
_INIT = f"{_MODULE}:DistributedOptimizer.__init__"
_STATE_DICT = f"{_MODULE}:DistributedOptimizer.state_dict"
_LOAD = f"{_MODULE}:DistributedOptimizer.load_state_dict"
# Stands for a parameter where there is none.
_NOTHING = "no parameter"
_SET_STATE = f"{_MODULE}:DistributedOptimizer._set_main_param_and_optimizer_states"


def _unneeded() -> str | None:
    from megatron.core.optimizer import distrib_optimizer

    return "Transformer Engine or NVIDIA apex provides Adam" if distrib_optimizer.HAVE_APEX_OR_TE else None


def _change() -> list[Undo]:
    def patched_init(init: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if _is_empty(self.optimizer):
            _count_steps(self.optimizer)

    def patched_state_dict(state_dict: Callable[..., Any], self: Any) -> dict[str, Any]:
        _start_state(self.optimizer)
        return state_dict(self)

    def patched_load_state_dict(load: Callable[..., None], self: Any, loaded: dict[str, Any]) -> None:
        load(self, loaded)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()
        if _NOTHING in self.optimizer.state:
            self.optimizer.state[_NOTHING]["step"].fill_(float(loaded["optimizer"]["param_groups"][0]["step"]))

    def patched_set_state(
        set_state: Callable[..., None], self: Any, model_param: torch.nn.Parameter, tensors: dict[str, Any]
    ) -> None:
        # Whatever is no tensor is left as it is: `step` was already set from the parameter groups.
        set_state(self, model_param, {**tensors, "step": None})

    return [
        wrap_attribute(_INIT, patched_init),
        wrap_attribute(_STATE_DICT, patched_state_dict),
        wrap_attribute(_LOAD, patched_load_state_dict),
        wrap_attribute(_SET_STATE, patched_set_state),
    ]


def _is_empty(optimizer: Any) -> bool:
    import torch

    adam = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
    return adam and not any(group["params"] for group in optimizer.param_groups)


def _count_steps(optimizer: Any) -> None:
    """Gives an optimizer without parameters a ``step``, which counts as in optimizers with parameters."""
    import torch

    optimizer.state[_NOTHING] = {"step": torch.tensor(0.0)}
    optimizer.register_step_post_hook(lambda stepped, *_: stepped.state[_NOTHING]["step"].add_(1))


def _start_state(optimizer: Any) -> None:
    """Gives each parameter that AdamW has not stepped yet the state that its first step starts from."""
    import torch

    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state[param]
            if "step" not in state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
                state.setdefault("exp_avg", torch.zeros_like(param.data))
                state.setdefault("exp_avg_sq", torch.zeros_like(param.data))


PATCH = Patch(
    name="adamw_resume",
    targets=(_INIT, _STATE_DICT, _LOAD, _SET_STATE),
    why=(
        "with torch's AdamW the distributed optimizer can't resume: "
        "megatron/core/optimizer/distrib_optimizer.py:838 asserts a step on a fresh optimizer, "
        ":1223 asks checkpoints for a step per parameter, "
        ":1028-1032 shares one step tensor among all parameters"
    ),
    change=_change,
    signature={_LOAD: ("state_dict",), _SET_STATE: ("model_param", "tensors")},
    unneeded=_unneeded,
)
