"""Indices of layers in few characters."""

from __future__ import annotations

# More pieces than this are abbreviated.
LABEL_PIECES = 4


def fold_indices(indices: list[int]) -> str:
    """``0-3`` for neighbours, ``0,2,…,30`` for every second, ``0,3,7`` for what has no rule."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    pieces = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    if len(pieces) > LABEL_PIECES:
        pieces = [*pieces[:2], "…", pieces[-1]]
    return ",".join(pieces)
