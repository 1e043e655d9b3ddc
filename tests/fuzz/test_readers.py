"""What of a file is damaged is told in one error of ours; nothing hangs, nothing takes the machine's memory."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from megasched.errors import MegaschedError
from tests.fuzz.readers import READERS
from tests.fuzz.run import failure, failures

# In a run of its own with an address space that ends: a reader that asks for all memory harms nobody.
MANY = 5000


def test_damaged_files_are_refused_or_read(capfd):
    assert list(failures(300)) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_damaged_files_are_refused_or_read():
    done = subprocess.run([sys.executable, "-m", "tests.fuzz.run", str(MANY), "7"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert f"{MANY} inputs, 0 failures" in done.stdout


# The others read words of a command line.
@pytest.mark.parametrize("name", sorted(READERS.keys() - {"option", "override"}))
@pytest.mark.parametrize("kind", ["fifo", "folder", "socket", "device", "loop"])
def test_what_is_no_file_is_refused_at_once(name, kind, tmp_path, monkeypatch, capfd):
    reader = READERS[name]
    reader.make(tmp_path)
    path = tmp_path / reader.file
    path.unlink()
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "device":
            path.symlink_to("/dev/zero")
        case "loop":
            path.symlink_to(path)
        case "socket":
            monkeypatch.chdir(path.parent)  # the path of a socket is short
            socket.socket(socket.AF_UNIX).bind(path.name)
    assert failure(reader, tmp_path) == ""
    if name == "owner":
        assert "the claim is taken over" in capfd.readouterr().err
        return
    with pytest.raises(MegaschedError):
        reader.read(tmp_path)
