"""Which architectures are proven: those of which megasched's own adapters say something."""

from __future__ import annotations

from typing import Any

from megasched.model_adapters.registry import own_adapters


def facts_of(what: str) -> dict[str, Any]:
    """Model type -> what its adapter says of its ``layer``, ``attention`` or ``moe``."""
    found = {model_type: getattr(adapter, what) for model_type, adapter in own_adapters().items()}
    return {model_type: facts for model_type, facts in found.items() if facts is not None}
