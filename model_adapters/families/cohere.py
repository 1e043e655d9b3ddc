"""Command R: neighbours are rotated together; since Command R7B only in layers with a window."""

from typing import Any

from megasched.model_adapters.reading.attention import rotated_in_windows
from megasched.model_adapters.registry import Adapter, AttentionFacts, MoeFacts

NEIGHBOURS = {"interleaved": True}


def rotated(config: Any) -> tuple[bool, ...]:
    """Returns whether each layer has positions: those with a window do; those with a plain MLP if forced."""
    forced = config.prefix_dense_sliding_window_pattern == 1
    layers = zip(config.layer_types or (), config.mlp_layer_types, strict=True)
    return tuple(window == "sliding_attention" or (forced and mlp == "dense") for window, mlp in layers)


ADAPTER = [
    Adapter(model_types=("cohere",), attention=AttentionFacts(NEIGHBOURS)),
    Adapter(model_types=("cohere2",), attention=AttentionFacts(NEIGHBOURS, rotated=rotated_in_windows)),
    Adapter(
        model_types=("cohere2_moe",),
        attention=AttentionFacts(NEIGHBOURS, rotated=rotated),
        moe=MoeFacts(normalized=True, shared="shared_experts"),
    ),
]
