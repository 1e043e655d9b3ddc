"""Files and folders that are there whole or not at all, with the rights that the umask lets them have."""

import os
import stat
from pathlib import Path

import pytest

from megasched.files import whole_folder, write_whole
from megasched.trainer.evidence.certificate import write_certificate
from megasched.verify.new_adapter.new_adapter import write_new


def make_folder(path):
    with whole_folder(path) as folder:
        (folder / "inside").touch()


@pytest.mark.parametrize("umask", [0o077, 0o002])
@pytest.mark.parametrize(
    "write",
    [
        make_folder,
        lambda path: write_whole(path, ["text"]),
        lambda path: write_certificate(path, {}, {}),
        lambda path: write_new("text", path),
        lambda path: write_new("text", path, force=True),
    ],
)
def test_the_umask_says_who_may_read(tmp_path, write, umask):
    """Some were open to all whatever it said, or closed to the group that it lets write."""
    path = tmp_path / "new"
    before = os.umask(umask)
    try:
        write(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == (0o777 if path.is_dir() else 0o666) & ~umask
    assert os.listdir(tmp_path) == ["new"]


@pytest.mark.parametrize("name", ["n" * 250, "absent/page.html"])
def test_what_cannot_be_written_is_called_as_it_was_asked_for(tmp_path, monkeypatch, name):
    """The name of the file that is written aside says nothing to anyone."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match=r"too long|No such file") as ended:
        write_whole(Path(name), ["text"])
    assert ended.value.filename == name
