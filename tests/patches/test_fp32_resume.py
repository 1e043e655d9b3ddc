"""Optimizer checkpoints in float32, default format and gathered: torch refuses the load without the patch."""

import pytest

from megasched.patches import undo
from tests.patches.optimizer_case import resume


def resume_unpatched(folder, kind):
    undo("fp32_resume")
    with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad"):
        resume(folder, kind)
    return "refused"


@pytest.mark.parametrize("kind", ["dp_reshardable", "dp_zero_gather_scatter"])
def test_the_fault_is_still_there_without_the_patch(ranks, tmp_path, kind):
    """With it: test_bucket_padding.py."""
    assert ranks.run(1, resume_unpatched, str(tmp_path / "checkpoint"), kind) == ["refused"]
