"""The dataset helpers of the wheel: Megatron ends the process without the patch, and works with it."""

import pytest

from megasched.patches import apply, undo, wheel_helpers


def compile_with_and_without():
    import megatron.core.datasets.utils as utils

    undo("wheel_helpers")
    try:
        utils.compile_helpers()
        without = "compiled"
    except SystemExit as error:
        without = error.code
    assert apply("wheel_helpers")
    return without, utils.compile_helpers(), wheel_helpers._unneeded()


def test_the_wheel_still_needs_it(ranks):
    assert ranks.run(1, compile_with_and_without) == [(1, None, None)]


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (["Makefile"], "has its Makefile"),
        (["Makefile", "helpers_cpp.cpython-312.so"], "has its Makefile"),
        ([], "has no compiled helpers_cpp"),
    ],
)
def test_it_keeps_away_from_a_checkout_and_from_a_broken_install(monkeypatch, tmp_path, files, reason):
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(wheel_helpers, "_helpers_folder", lambda: tmp_path)
    assert reason in wheel_helpers._unneeded()
