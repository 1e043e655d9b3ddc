"""What tests of a file leave changed in their process fails the last of them: the next file would go by it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from megasched.patches.host_cuda import dynamo_is_off

# Pytest's, and what torch sets when it is imported or compiles.
OTHERS = ("PYTEST_", "TORCHINDUCTOR_", "_TORCHINDUCTOR_")
KEY = pytest.StashKey[dict[str, Any]]()


def state() -> dict[str, Any]:
    """What all that runs in a process shares, as far as tests have ever changed it."""
    found: dict[str, Any] = {
        f"os.environ[{name!r}]": value for name, value in os.environ.items() if not name.startswith(OTHERS)
    }
    found |= {"os.getcwd()": os.getcwd(), "sys.argv": list(sys.argv)}
    torch = sys.modules.get("torch")
    found["torch.get_default_dtype()"] = str(torch.get_default_dtype() if torch else "torch.float32")
    found["torch.is_grad_enabled()"] = torch.is_grad_enabled() if torch else True
    found["function modes of torch"] = len(torch.overrides._get_current_function_mode_stack()) if torch else 0
    found["torch._dynamo.config.disable"] = dynamo_is_off()
    return found


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [
        f"{name} was {before.get(name)!r} and is {after.get(name)!r}"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if KEY not in item.config.stash:
        item.config.stash[KEY] = state()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    done = yield
    if nextitem is None or nextitem.path != item.path:
        before, item.config.stash[KEY] = item.config.stash[KEY], state()
        left = changes(before, item.config.stash[KEY])
        assert not left, f"{item.path.name} leaves behind, for whatever runs next in this process:\n" + "\n".join(
            left
        )
    return done
