"""Which faults the installed Megatron has, so that the tests of patches hold for every supported one."""

from packaging.version import Version

from megasched.trainer.entry import find_megatron

# Patch -> the release whose Megatron has mended the fault. Before that it must be there, or the patch goes.
MENDED_IN = {"bucket_padding": "0.20", "float32_numbers": "0.20"}


def fault_is_there(name):
    return name not in MENDED_IN or Version(find_megatron().version) < Version(MENDED_IN[name])
