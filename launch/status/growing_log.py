"""Reads one log file on from where the last look at it ended.

Logs grow to hundreds of megabytes, mostly of lines that no report needs. The needed ones are found by searching
whole blocks for a few marks, which is 10 times as fast as looking at each line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megasched.launch.status import failure_log, training_log
from megasched.launch.status.failure_log import FailureLog
from megasched.launch.status.training_log import TrainingLog
from megasched.reading.files import open_regular
from megasched.reading.log_lines import LOG, LONGEST

BLOCK_BYTES = 2**20
# What ended a run stands at the end of its log; that much of what is there at the first look is searched for it.
FAILURE_BYTES = 4 * 2**20


class GrowingLog:
    """Holds what a log has said so far.

    Attributes:
        path: path of the file.
        training: numbers of the training.
        failure: failures since training last went on.
        foreign: whether it has lines, and none of them is of a run.
        modified: when the last line came, in seconds since the epoch, as of the last look.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start_over()

    def _start_over(self) -> None:
        self.training = TrainingLog()
        self.failure = FailureLog()
        self.foreign = False
        self.modified = 0.0
        self._signed = False
        self._offset = 0
        self._inode = -1

    def refresh(self) -> None:
        """Reads the whole lines that have come; a file that was replaced or cut is read anew."""
        found = self.path.stat()
        if found.st_size < self._offset or self._inode not in (-1, found.st_ino):
            self._start_over()
        self.modified, self._inode = found.st_mtime, found.st_ino
        if found.st_size == self._offset:
            return
        search_from = max(self._offset, found.st_size - FAILURE_BYTES)
        with open_regular(self.path, LOG) as file:
            file.seek(self._offset)
            while block := file.read(BLOCK_BYTES) + file.readline(LONGEST):
                lines = block[: block.rfind(b"\n") + 1]
                if not lines and len(block) >= BLOCK_BYTES + LONGEST:  # a line that is none of a run's
                    self._offset += len(block)
                    continue
                self._offset += len(lines)
                self._read(lines, failures=self._offset > search_from)
                if len(lines) < len(block):  # the last line is being written
                    break

    def _read(self, lines: bytes, *, failures: bool) -> None:
        self._signed = self._signed or any(sign in lines for sign in training_log.SIGNS)
        self.foreign = not self._signed and bool(lines.strip())
        marks = training_log.MARKS + (failure_log.MARKS if failures else ())
        for found in _lines_with(lines, marks):
            line = found.decode(errors="replace")
            starts = len(self.training.starts)
            if self.training.read(line) is not None or len(self.training.starts) > starts:
                self.failure = FailureLog()
            elif failures:
                self.failure.read(line)


def _lines_with(lines: bytes, marks: Sequence[bytes]) -> Iterator[bytes]:
    """Yields those of the lines that have a mark in them, in their order; every line must end with a newline."""
    spans = set()
    for mark in marks:
        at = lines.find(mark)
        while at >= 0:
            end = lines.index(b"\n", at)
            spans.add((lines.rfind(b"\n", 0, at) + 1, end))
            at = lines.find(mark, end)
    for start, end in sorted(spans):
        yield lines[start:end]
