"""Draws three pictures of a search: its history, all trials over all symbols, and the scores over two symbols."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from megasched.tuner.space import Space, Symbol
from megasched.tuner.study import Trial

LOST = {"oom": "tab:purple", "timeout": "tab:orange", "refused": "tab:olive", "crash": "tab:red"}
SCORE = "samples per second"


def save_plots(space: Space, trials: Sequence[Trial], folder: Path) -> list[Path]:
    """Writes ``history.png``, ``parallel.png`` and, of two symbols or more, ``heatmap.png``; needs no display.

    Nothing is written of a search without any score.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if all(trial.result.score is None for trial in trials):
        return []
    folder.mkdir(parents=True, exist_ok=True)
    drawings = {"history": draw_history, "parallel": draw_parallel}
    if len(space.symbols) > 1:
        drawings["heatmap"] = draw_heatmap
    written = []
    for name, draw in drawings.items():
        figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
        draw(axes, space, trials)
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], dpi=120)
        pyplot.close(figure)
    return written


def draw_history(axes: Any, space: Space, trials: Sequence[Trial]) -> None:
    """Draws the scores in the order of trials, and the best so far; trials without one stand at the bottom."""
    scores = [trial.result.score or 0.0 for trial in trials]
    axes.step(range(len(trials)), list(accumulate(scores, max)), where="post", color="grey", label="best so far")
    good = [i for i, trial in enumerate(trials) if trial.result.score is not None]
    axes.scatter(good, [scores[i] for i in good], label="ok", zorder=3)
    for outcome, colour in LOST.items():
        places = [i for i, trial in enumerate(trials) if trial.result.outcome == outcome]
        if places:
            axes.scatter(places, [0.0] * len(places), marker="x", color=colour, label=outcome, zorder=3)
    axes.set_xlabel("trial")
    axes.set_ylabel(SCORE)
    axes.set_ylim(bottom=-0.02 * max(scores))
    axes.legend()


def draw_parallel(axes: Any, space: Space, trials: Sequence[Trial]) -> None:
    """Draws a line a trial through its values on one axis a symbol, coloured by score; without one dashed."""
    import matplotlib

    symbols = list(space.symbols.values())
    scores = [trial.result.score for trial in trials if trial.result.score is not None]
    colours = matplotlib.cm.ScalarMappable(matplotlib.colors.Normalize(min(scores), max(scores)), "viridis")
    for trial in sorted(trials, key=lambda trial: trial.result.score or 0.0):
        active = [(i, symbol) for i, symbol in enumerate(symbols) if symbol.name in trial.point]
        heights = [_height(symbol, trial.point[symbol.name]) for _, symbol in active]
        score = trial.result.score
        style: dict[str, Any] = {"color": "lightgrey", "linestyle": "--", "zorder": 0}
        if score is not None:
            style = {"color": colours.to_rgba(score), "linewidth": 1.5}
        axes.plot([i for i, _ in active], heights, marker="o", **style)
    for place, symbol in enumerate(symbols):
        for value in symbol.values:
            axes.annotate(str(value), (place, _height(symbol, value)), xytext=(6, 2), textcoords="offset points")
    axes.set_xticks(range(len(symbols)), [symbol.name for symbol in symbols], rotation=20)
    axes.set_yticks([])
    axes.figure.colorbar(colours, ax=axes, label=SCORE)


def _height(symbol: Symbol, value: Any) -> float:
    return symbol.ranks[value] / max(1, len(symbol.values) - 1)


def two_symbols(space: Space) -> tuple[Symbol, Symbol]:
    """Returns the axes of the heat map: the two symbols with the most values, the first ones among equals."""
    first, second = sorted(space.symbols.values(), key=lambda symbol: -len(symbol.values))[:2]
    return first, second


def best_of_cells(space: Space, trials: Sequence[Trial]) -> dict[tuple[int, int], Trial]:
    """Maps (rank of the first symbol's value, rank of the second's) to the best trial over all other symbols."""
    first, second = two_symbols(space)
    cells: dict[tuple[int, int], Trial] = {}
    for trial in trials:
        if first.name not in trial.point or second.name not in trial.point:
            continue
        cell = first.ranks[trial.point[first.name]], second.ranks[trial.point[second.name]]
        if cell not in cells or (trial.result.score or 0.0) > (cells[cell].result.score or 0.0):
            cells[cell] = trial
    return cells


def draw_heatmap(axes: Any, space: Space, trials: Sequence[Trial]) -> None:
    """Draws the best score of each pair of values; where there is none, the outcome stands there."""
    import numpy as np

    first, second = two_symbols(space)
    cells = best_of_cells(space, trials)
    scores = np.full((len(second.values), len(first.values)), np.nan)
    for (x, y), trial in cells.items():
        scores[y, x] = trial.result.score or np.nan
        if trial.result.score is None:
            axes.text(x, y, trial.result.outcome, ha="center", va="center", color=LOST[trial.result.outcome])
    image = axes.imshow(scores, origin="lower", aspect="auto", cmap="viridis")
    for axis, symbol in ((axes.xaxis, first), (axes.yaxis, second)):
        axis.set_ticks(range(len(symbol.values)), [str(value) for value in symbol.ranks])
        axis.set_label_text(symbol.name)
    axes.figure.colorbar(image, ax=axes, label=SCORE)
