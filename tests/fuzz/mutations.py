"""Files that somebody damaged: seeded changes of bytes, of text and of the data that the text says."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

# What stands in the place of a value or of some bytes.
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**18, 0.5, 1e308, -1e308),
    *(
        float("nan"),
        float("inf"),
        "",
        "x",
        "../../x",
        "a" * 5000,
        "\0",
        "\ud800",
        "é",
        "²",
        "٣",
        "$(id)",
        "/dev/zero",
    ),
    *([], {}, [[]], [0] * 1000, {"a": {"b": []}}, {"$tuple": 3}, {"$function": ["os:system"]}),
)
ODD_BYTES = (
    *(
        b"",
        b"\0",
        b"\xff",
        b"\xef\xbb\xbf",
        b"\xff\xfe",
        b"\xc3",
        b"\xed\xa0\x80",
        b"\n",
        b"\r\n",
        b"{",
        b"[",
        b'"',
        b"\\",
    ),
    *(b"[" * 20_000, b'{"a":' * 20_000, b"9" * 5000, "²".encode(), b"1e999", b"-", b"NaN", b"\\ud800", b"\\u0000"),
    *(b"\x80\x04", b"r\xff\xff\xff\x7f", b"\x8e" + b"\xff" * 7 + b"\x00", b"c__main__\nx\n", b"PK\x03\x04"),
)


def damaged(content: bytes, draw: random.Random) -> bytes:
    """The content with one to four changes."""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        content = draw.choice(CHANGES)(content, draw)
    return content


def _flip(content: bytes, draw: random.Random) -> bytes:
    if not content:
        return content
    found = bytearray(content)
    for _ in range(draw.choice((1, 1, 8))):
        found[draw.randrange(len(found))] = draw.randrange(256)
    return bytes(found)


def _cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content) + 1)]


def _drop(content: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(len(content) + 1)
    return content[:start] + content[start + draw.choice((1, 4, 40)) :]


def _insert(content: bytes, draw: random.Random) -> bytes:
    at = draw.choice((0, draw.randrange(len(content) + 1), len(content)))
    return content[:at] + draw.choice(ODD_BYTES) + content[at:]


def _replace_all(content: bytes, draw: random.Random) -> bytes:
    return draw.choice((*ODD_BYTES, json.dumps(draw.choice(ODD_VALUES)).encode(), content * 3))


def _replace_number(content: bytes, draw: random.Random) -> bytes:
    """One number in text, or some bytes of one that is binary."""
    digits = [at for at in range(len(content)) if content[at : at + 1].isdigit()]
    if not digits:
        return _flip(content, draw)
    at = draw.choice(digits)
    other = (b"0", b"-1", b"9" * 18, b"9" * 30, b"9" * 5000, b"1e400", b"2147483648", "²".encode())
    return content[:at] + draw.choice(other) + content[at + 1 :]


def _replace_value(content: bytes, draw: random.Random) -> bytes:
    """One value anywhere in JSON."""
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        return _flip(content, draw)
    places = list(_places(data))
    if not places:
        return json.dumps(draw.choice(ODD_VALUES)).encode()
    level, key = draw.choice(places)
    change = draw.randrange(4)
    if change == 0:
        del level[key]
    elif change == 1 and isinstance(level, dict):
        level[draw.choice(("x", "", "\ud800", "a" * 300, "model_type"))] = level.pop(key)
    else:
        level[key] = draw.choice(ODD_VALUES)
    return json.dumps(data).encode()


def _places(data: Any) -> Any:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in list(items):
        yield data, key
        yield from _places(value)


Change = Callable[[bytes, random.Random], bytes]
CHANGES: tuple[Change, ...] = (
    *(_flip, _cut, _drop, _insert, _replace_all, _replace_number, _replace_value, _replace_value, _replace_value),
)
