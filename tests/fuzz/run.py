"""Damaged files through every reader: what comes of each is nothing, or one error of ours; in time, and small.

python -m tests.fuzz.run COUNT [SEED]
"""

from __future__ import annotations

import random
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

from megasched.errors import MegaschedError
from tests.fuzz.mutations import damaged
from tests.fuzz.readers import READERS, Reader

SECONDS = 10
GIB = 1 << 30


class Hang(BaseException):
    """A reader that took too long."""


def failure(reader: Reader, folder: Path) -> str:
    """What a reader did with a folder that it should not have; empty if all is well."""

    def hang(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(SECONDS)
    try:
        reader.read(folder)
    except MegaschedError as error:
        return _unfit(str(error))
    except Hang:
        return f"more than {SECONDS} s"
    except BaseException as error:  # SystemExit, too, of what a file made run
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error!s:.200} ({Path(last.filename).name}:{last.lineno})"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return ""


def _unfit(message: str) -> str:
    """Why no terminal shows a message, or nobody reads it; empty if it is fine."""
    if len(message) > 20_000:
        return f"an error of {len(message)} characters"
    try:
        message.encode()
    except UnicodeEncodeError:
        return f"an error that is no text: {message!r:.200}"
    return ""


def damaged_folder(reader: Reader, folder: Path, draw: random.Random) -> None:
    """Fills a folder with what the reader takes, one file of it damaged."""
    reader.make(folder)
    path = folder / reader.file
    content = path.read_bytes()
    path.write_bytes(damaged(content, draw))


def failures(count: int, seed: int = 0) -> Iterator[str]:
    """What went wrong with so many inputs, readers in turn; each with its reader and its number."""
    names = list(READERS)
    for number in range(count):
        draw = random.Random(seed * 1_000_003 + number)
        name = names[number % len(names)]
        with tempfile.TemporaryDirectory() as folder:
            damaged_folder(READERS[name], Path(folder), draw)
            why = failure(READERS[name], Path(folder))
        if why:
            yield f"{name}, input {number} of seed {seed}: {why}"


def peak() -> int:
    """Bytes of memory that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    count, seed = int(sys.argv[1]), int((*sys.argv[2:], "0")[0])
    list(failures(len(READERS)))  # imports what readers need
    held = peak()
    resource.setrlimit(resource.RLIMIT_AS, (64 * GIB, 64 * GIB))
    found = list(failures(count, seed))
    print("\n".join(found))
    grown = peak() - held
    print(f"{count} inputs, {len(found)} failures, {grown / GIB:.2f} GiB more than before")
    sys.exit(bool(found) or grown > GIB)


if __name__ == "__main__":
    main()
