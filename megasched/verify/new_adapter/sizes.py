"""Sizes of packed projections as expressions of the config, so that an adapter holds for every size of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def _head_dim(config: Any) -> int:
    return config.hidden_size // config.num_attention_heads


# Text -> its value; the first that fits counts. What a config lacks does not fit.
_EXPRESSIONS: tuple[tuple[str, Callable[[Any], int]], ...] = (
    ("config.hidden_size", lambda config: config.hidden_size),
    ("config.intermediate_size", lambda config: config.intermediate_size),
    ("config.num_attention_heads * config.head_dim", lambda config: config.num_attention_heads * config.head_dim),
    ("config.num_key_value_heads * config.head_dim", lambda config: config.num_key_value_heads * config.head_dim),
    (
        "config.hidden_size // config.num_attention_heads * config.num_key_value_heads",
        lambda config: _head_dim(config) * config.num_key_value_heads,
    ),
    ("config.hidden_size // config.num_attention_heads", _head_dim),
)


def write_sizes(seen: Sequence[tuple[Any, tuple[int, ...]]]) -> str | None:
    """The sizes of the parts as Python text, e.g. ``(config.hidden_size,) * 3``; None where one is no field.

    Args:
        seen: configs of one architecture, each with the sizes in its model: the more, the fewer chance hits.
    """
    columns = list(zip(*(sizes for _, sizes in seen), strict=True))
    words = [_write([config for config, _ in seen], sizes) for sizes in columns]
    if None in words:
        return None
    if len(set(words)) == 1:
        return f"({words[0]},) * {len(words)}"
    return f"({', '.join(filter(None, words))})"


def _write(configs: Sequence[Any], sizes: tuple[int, ...]) -> str | None:
    """One size, as it is in each of the configs."""
    for text, value in _EXPRESSIONS:
        if all(_evaluate(value, config) == size for config, size in zip(configs, sizes, strict=True)):
            return text
    fields = sorted(name for name, value in vars(configs[0]).items() if type(value) is int)
    for name in fields:
        if all(getattr(config, name, None) == size for config, size in zip(configs, sizes, strict=True)):
            return f"config.{name}"
    return None


def _evaluate(value: Callable[[Any], int], config: Any) -> int | None:
    try:
        return value(config)
    except (AttributeError, TypeError):  # a field that it lacks, or that is None
        return None
