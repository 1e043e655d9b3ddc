"""Folds module paths over layers into the globs of an adapter."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping

_INDEX = re.compile(r"\.\d+(?=\.|$)")


def fold_paths[Value](values: Mapping[str, Value], paths: Iterable[str]) -> dict[str, Value]:
    """Maps globs to values, so that each path matches a glob with its value and no other path matches one.

    Paths that a glob would not tell from others keep their indices.

    Args:
        values: path -> its value.
        paths: all paths that a glob may match.
    """
    groups: dict[str, list[str]] = {}
    for path in values:
        groups.setdefault(_INDEX.sub(".*", path), []).append(path)
    everything, found = list(paths), {}
    for pattern, members in groups.items():
        matched = {path for path in everything if fnmatch.fnmatchcase(path, pattern)}
        if matched == set(members) and all(values[path] == values[members[0]] for path in members):
            found[pattern] = values[members[0]]
        else:
            found |= {path: values[path] for path in members}
    return found
