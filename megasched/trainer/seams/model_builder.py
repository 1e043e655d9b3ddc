"""Has Megatron's trainer build scheduled models, whichever of its own models the script describes."""

from __future__ import annotations

from typing import Any, NoReturn

from megasched.attributes import Undo, set_attribute
from megasched.errors import ConfigError
from megasched.patches.registry import Patch

_BUILDER = "megatron.training.models.base:ModelConfig.get_builder_cls"
_PROVIDER = "megatron.training.training:get_model"

# The models in whose place the Hugging Face one stands. Both have the config of layers with sizes, precision and
# parallelism, which come from the HF config.
REPLACED = tuple(f"megatron.training.models.{name}ModelBuilder" for name in ("gpt.GPT", "hybrid.Hybrid"))
_REMEDY = "run Megatron's pretrain_gpt.py or pretrain_hybrid.py, or the scripts that megasched brings along"


def _scheduled(config: Any) -> type:
    from megasched.trainer.builder import ScheduledModelBuilder

    if config.builder not in REPLACED:
        raise ConfigError(
            f"the script describes a model by {type(config).__name__}, which {config.builder} builds; a Hugging "
            f"Face model can stand for Megatron's GPTModel and HybridModel: {_REMEDY}"
        )
    return ScheduledModelBuilder


def _refused(*given: Any, **named: Any) -> NoReturn:
    raise ConfigError(
        "the script hands Megatron a function that makes its model (model_provider), and not a description of it: "
        f"that would train Megatron's own model in the place of --hf-model. Remedy: {_REMEDY}"
    )


def _change() -> list[Undo]:
    return [
        set_attribute(_BUILDER, _scheduled),
        set_attribute(_PROVIDER, _refused, rebind=("megatron",)),
    ]


PATCH = Patch(
    name="model_builder",
    targets=(_BUILDER, _PROVIDER),
    why=(
        "megatron/training/training.py:2048 asks the config of the model for its builder, and :2061 calls a "
        "function of the script where there is none"
    ),
    change=_change,
    signature={_BUILDER: ("self",), _PROVIDER: ("model_provider_func",)},
)
