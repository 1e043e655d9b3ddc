"""The default format of optimizer checkpoints in float32: torch refuses the load without the patch."""

import pytest

from megasched.patches import undo
from tests.patches.optimizer_case import resume


def resume_unpatched(folder):
    undo("fp32_resume")
    with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad"):
        resume(folder, "dp_reshardable")
    return "refused"


def test_the_fault_is_still_there_without_the_patch(ranks, tmp_path):
    """With it: ``test_a_resumed_run_is_the_uninterrupted_one`` in test_adamw_resume.py."""
    assert ranks.run(1, resume_unpatched, str(tmp_path / "checkpoint")) == ["refused"]
