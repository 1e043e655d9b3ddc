"""Decides at once whether what a flag names can be there: a folder, a config file, or a hub id."""

from __future__ import annotations

import os
import re

from megasched.errors import ConfigError

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# The hub is asked over the network, which answers at once or is not there.
SECONDS_TO_ASK = 3
# Behind one of these, nothing is reached directly.
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


def check_hf_model(name: str, flag: str = "--hf-model") -> None:
    """Checks that a model, or a tokenizer, is there.

    transformers is not asked, which tries an unreachable hub for half a minute.

    Args:
        name: a path, or a hub id: ``organisation/model``, where no folder has the organisation's name.
        flag: that has named it, for messages.

    Raises:
        ConfigError: there is no such path; a hub id is not in the cache, and the hub can't be reached.
    """
    if os.path.lexists(name) or is_cached(name):
        return
    is_path = not HUB_ID.fullmatch(name) or name.endswith(".json") or os.path.isdir(os.path.dirname(name))
    if is_path:
        raise ConfigError(f"{flag} {name}: no such file or folder")
    if why := _unreachable():
        raise ConfigError(
            f"{flag} {name}: there is no such folder; as a hub id, it is not in {_cache()}, and the hub can't "
            f"be asked: {why}"
        )


def is_cached(name: str) -> bool:
    """Returns whether the hub's cache on this machine has a model of this id."""
    return os.path.isdir(os.path.join(_cache(), f"models--{name.replace('/', '--')}"))


def _cache() -> str:
    from huggingface_hub.constants import HF_HUB_CACHE

    return HF_HUB_CACHE


def _unreachable() -> str:
    """Returns why the hub can't be asked; empty where it can be, or where only a request would tell."""
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if any(os.environ.get(proxy) for proxy in PROXIES):
        return ""
    import socket
    from urllib.parse import urlsplit

    hub = urlsplit(ENDPOINT)
    try:
        with socket.create_connection((hub.hostname or "", hub.port or 443), timeout=SECONDS_TO_ASK):
            return ""
    except OSError as error:
        return f"{hub.hostname}: {error.strerror or error}"
