"""Which faults the installed Megatron has, for tests under every supported one, and runs that have a fault."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from packaging.version import Version

from megasched.patches import undo
from megasched.trainer import entry
from megasched.trainer.entry import find_megatron

# Patch -> the release whose Megatron has mended the fault. Before that it must be there, or the patch goes.
MENDED_IN = {"bucket_padding": "0.20", "float32_numbers": "0.20"}


def fault_is_there(name):
    return name not in MENDED_IN or Version(find_megatron().version) < Version(MENDED_IN[name])


@contextmanager
def run_without(name: str) -> Iterator[None]:
    """In a rank: a run in the body applies all patches but this one."""
    apply_all = entry.apply_patches

    def apply_others() -> None:
        apply_all()
        undo(name)

    with mock.patch.object(entry, "apply_patches", apply_others):
        yield
