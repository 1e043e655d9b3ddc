"""Applies Megatron's recompute flags to a definition's layers."""

from __future__ import annotations

from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megasched.analysis.stages.layer_stack import LayerStack
from megasched.errors import ConfigError
from megasched.layers.megatron.attention import MegatronAttention
from megasched.layers.megatron.layer import MegatronLayer
from megasched.layers.wrap import recompute_module
from megasched.trainer.flags.honoured_flags import MLA_UP_PROJ
from megasched.trainer.stages.stage import Stage


def apply_recompute_flags(
    model: nn.Module, structure: LayerStack, stage: Stage, config: TransformerConfig
) -> None:
    """Applies ``--recompute-granularity`` full (uniform or block) or selective to this stage's layers.

    Selective covers core_attn and mlp; Megatron's own layers do it themselves, for all that Megatron has.
    ``uniform`` recomputes every layer, each on its own: a definition calls its layers one by one, so a group of
    several can't be one unit, and ``--recompute-num-layers`` above 1 keeps more than it asks for, never less.
    ``block`` recomputes the first ``--recompute-num-layers`` of each chunk.

    Raises:
        ConfigError: a recompute module that a definition does not have.
    """
    paths = [structure.layer_path(index) for index in range(stage.start, stage.stop)]
    layers = {path: model.get_submodule(path) for path in paths}
    if config.recompute_granularity == "full":
        if config.recompute_method == "block":
            paths = paths[: config.recompute_num_layers]
        for path in paths:
            recompute_module(layers[path], path)
    elif config.recompute_granularity == "selective":
        _selective(layers, config.recompute_modules or ["core_attn"])


def _selective(layers: dict[str, nn.Module], modules: list[str]) -> None:
    of_layers = [module for layer in layers.values() for module in layer.modules()]
    if MLA_UP_PROJ in modules and not any(isinstance(module, MLASelfAttention) for module in of_layers):
        raise ConfigError(
            f"--recompute-modules {MLA_UP_PROJ}: no layer has latent attention of Megatron's; recompute "
            "modules of the definition by .checkpoint() in the schedule"
        )
    # Megatron's sees to it itself.
    layers = {path: layer for path, layer in layers.items() if not isinstance(layer, MegatronLayer)}
    for name in modules:
        if name == "core_attn":
            _core_attention(list(layers.values()))
        elif name == "mlp":
            for path, layer in layers.items():
                name_of_mlp = _mlp(layer)
                recompute_module(getattr(layer, name_of_mlp), f"{path}.{name_of_mlp}")
        elif layers:
            raise ConfigError(
                f"--recompute-modules {name}: a definition has core_attn and mlp; recompute others by "
                '.checkpoint() in the schedule, e.g. sch["model.layers.*.input_layernorm"].checkpoint()'
            )


def _core_attention(layers: list[nn.Module]) -> None:
    modules = [module for layer in layers for module in layer.modules()]
    found = [module.megasched_attention for module in modules if hasattr(module, "megasched_attention")]
    by_megatron = any(isinstance(module, MegatronAttention) for module in modules)  # which sees to it itself
    if layers and not found and not by_megatron:
        raise ConfigError(
            "--recompute-modules core_attn: this definition does not call attention through HF's "
            "AttentionInterface; recompute the module around it by .checkpoint() in the schedule"
        )
    for settings in found:
        settings.recompute = True


def _mlp(layer: nn.Module) -> str:
    for name in ("mlp", "feed_forward", "ffn"):
        if isinstance(getattr(layer, name, None), nn.Module):
            return name
    raise ConfigError(
        f"--recompute-modules mlp: {type(layer).__name__} has no MLP module of its own; recompute the whole "
        "layer by .checkpoint() in the schedule"
    )
