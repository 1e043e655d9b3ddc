"""Draws results to PNG files: bars for contenders and primitives, lines over the layers for construction.

Trainers over several numbers of ranks are drawn together, too.

python bench/plot.py [bench/results/NAME.json ...] [--into FOLDER]
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import machine
from matplotlib import pyplot


def contenders(axes: Any, data: dict[str, Any]) -> None:
    """Tokens per second, with quartiles over the rounds."""
    names = list(data["tokens_per_second"])
    tokens = {name: data["tokens_per_second"][name] * data["seconds"][name]["median"] for name in names}
    medians = [data["tokens_per_second"][name] for name in names]
    low = [m - tokens[n] / data["seconds"][n]["high_quartile"] for n, m in zip(names, medians, strict=True)]
    high = [tokens[n] / data["seconds"][n]["low_quartile"] - m for n, m in zip(names, medians, strict=True)]
    axes.bar(names, medians, yerr=[low, high], capsize=4)
    axes.set_ylabel("tokens / s")
    axes.tick_params(axis="x", rotation=30)
    pyplot.setp(axes.get_xticklabels(), horizontalalignment="right")


def trainers(axes: Any, data: dict[str, Any]) -> None:
    """The same, and the peak memory of a rank beside."""
    contenders(axes, data)
    beside = axes.twinx()
    beside.plot(list(data["tokens_per_second"]), [_peak(data, name) for name in data["tokens_per_second"]], "kD")
    beside.set_ylabel("peak GB of a rank (diamonds)")
    beside.set_ylim(bottom=0)


def _peak(data: dict[str, Any], name: str) -> float:
    return data["peak_bytes"][name] / 1e9


def construction(axes: Any, data: dict[str, Any]) -> None:
    """CPU seconds over the number of layers."""
    rows = sorted(data["rows"], key=lambda row: row["layers"])
    for key in ("plan_seconds", "build_seconds"):
        if key in rows[0]:
            axes.plot([row["layers"] for row in rows], [row[key] for row in rows], marker="o", label=key)
    axes.set_xlabel("layers")
    axes.set_ylabel("CPU seconds")
    axes.set_ylim(bottom=0)
    axes.legend()


def primitives(axes: Any, data: dict[str, Any]) -> None:
    """What the calls add to the plan, per layer."""
    found = data["primitives"]
    axes.barh(list(found), [row["milliseconds_added_per_layer"] for row in found.values()])
    axes.set_xlabel("ms added to the plan, per layer")


# What a results file is recognised by -> how it is drawn.
DRAWINGS: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "layouts": trainers,
    "tokens_per_second": contenders,
    "rows": construction,
    "primitives": primitives,
}


def draw(path: Path, folder: Path) -> Path | None:
    """The PNG of one results file; None for one that no drawing is for."""
    data = json.loads(path.read_text())
    kind = next((key for key in DRAWINGS if key in data), None)
    if kind is None:
        return None
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    DRAWINGS[kind](axes, data)
    axes.set_title(f"{path.stem} ({data['machine']['gpu'] or data['machine']['processor']})", fontsize=9)
    target = folder / f"{path.stem}.png"
    figure.savefig(target, dpi=150)
    pyplot.close(figure)
    return target


def scaling(paths: Sequence[Path], folder: Path) -> list[Path]:
    """The PNGs of trainers over numbers of ranks, where all else of the results is the same."""
    series: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for path in paths:
        data = json.loads(path.read_text())
        if "layouts" in data:
            described = {key: data["machine"][key] for key in ("processor", "gpu")}
            alike = {**data["job"], **described, "ranks": None}
            series[json.dumps(alike)][data["job"]["ranks"]] = data
    drawn = []
    for alike, by_ranks in series.items():
        if len(by_ranks) > 1:
            job = json.loads(alike)
            drawn.append(folder / f"trainers_{job['shape']}_tp{job['tp']}_scaling.png")
            _lines(by_ranks, drawn[-1])
    return drawn


def _lines(by_ranks: dict[int, dict[str, Any]], target: Path) -> None:
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    names = dict.fromkeys(name for data in by_ranks.values() for name in data["tokens_per_second"])
    for name in names:
        ranks = [count for count in sorted(by_ranks) if name in by_ranks[count]["tokens_per_second"]]
        speeds = [by_ranks[count]["tokens_per_second"][name] for count in ranks]
        axes[0].plot(ranks, speeds, marker="o", label=name)
        axes[1].plot(ranks, [_peak(by_ranks[count], name) for count in ranks], marker="o")
    for each, what in zip(axes, ("tokens / s", "peak GB of a rank"), strict=True):
        each.set_xlabel("ranks")
        each.set_xticks(sorted(by_ranks))
        each.set_ylabel(what)
        each.set_ylim(bottom=0)
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(target, dpi=150)
    pyplot.close(figure)


def main() -> None:
    own = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own.add_argument("results", nargs="*", type=Path, help="by default all in bench/results")
    own.add_argument("--into", type=Path, default=Path("."), help="folder of the PNG files")
    options = own.parse_args()
    options.into.mkdir(parents=True, exist_ok=True)
    paths = options.results or sorted(machine.RESULTS.glob("*.json"))
    for path in paths:
        print(f"{path}: {draw(path, options.into) or 'nothing to draw'}")
    for target in scaling(paths, options.into):
        print(target)


if __name__ == "__main__":
    main()
