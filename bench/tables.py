"""The tables of docs/benchmarks.md, made from the results: between ``<!-- NAME.json -->`` and ``<!-- end -->``.

python bench/tables.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import machine
import roofline

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
_PLACE = re.compile(r"(<!-- (\S+\.json) -->\n).*?(<!-- end -->)", re.DOTALL)


def contenders(data: dict[str, Any]) -> list[str]:
    rows = []
    for name, speed in data["tokens_per_second"].items():
        versus = [_ratio(data["speed_relative_to"].get(base, {}).get(name)) for base in ("native", "hf_eager")]
        emulated = data["emulation"].get(name)
        share = f"{emulated['seconds'] / data['seconds'][name]['median']:.2%}" if emulated else ""
        rows.append([f"`{name}`", f"{speed:.0f}", *versus, f"{data['peak_bytes'][name] / 1e9:.2f} GB", share])
    head = ["contender", "tokens/s", "speed / native", "speed / hf_eager", "peak memory", "emulation"]
    return [*_table(head, rows), *_left_out(data)]


def trainers(data: dict[str, Any]) -> list[str]:
    rows = []
    for name, speed in data["tokens_per_second"].items():
        layout, seconds = data["layouts"][name], data["rounds"][name]
        fastest = speed * data["seconds"][name]["median"] / min(seconds)
        versus = [_ratio(to.get(name)) for to in data["speed_relative_to"].values()]
        cells = [f"`{name}`", f"{layout['tp']} x {layout['dp']}", f"{speed:.0f}", f"{fastest:.0f}", *versus]
        rows.append([*cells, _gb(data["peak_bytes"][name])])
    bases = [f"speed / {base}" for base in data["speed_relative_to"]]
    head = ["trainer", "TP x DP", "tokens/s", "fastest round", *bases, "peak memory of a rank"]
    return [*_table(head, rows), *_left_out(data)]


def kernels(data: dict[str, Any]) -> list[str]:
    found = data["layers"]
    # What travels between ranks is not in the estimate.
    estimates = roofline.milliseconds(data["setting"], found) if data.get("ranks", 1) == 1 else {}
    rows = []
    for name, layer in found.items():
        count = "/".join(str(layer[part]["kernels"]) for part in ("forward", "backward"))
        kept, moved = layer["kept_bytes"], layer["moved_bytes"]["all"]
        row = [f"`{name}`", count, f"{kept / 1e6:.0f} MB", f"{moved / 1e6:,.0f} MB"]
        if estimates:
            row += [f"{estimates[name]:.2f} ms", f"{estimates['native'] / estimates[name]:.3f}"]
        rows.append(row)
    head = ["contender", "kernels", "kept", "moved"]
    head += ["layer on an H100, estimated", "speed / native"] if estimates else []
    return [*_table(head, rows), *_left_out(data)]


def construction(data: dict[str, Any]) -> list[str]:
    built = "build_seconds" in data["rows"][0]
    head = ["layers", "plan", "memory with imports"]
    head += ["layers built", "build", "shards", "peak of the build"] if built else []
    rows = []
    for row in data["rows"]:
        cells = [row["layers"], _seconds(row["plan_seconds"]), _gb(row["imports_bytes"] + row["plan_bytes"])]
        if built:
            cells += [f"{row['stage_layers']} (stage {row['stage']})", _seconds(row["build_seconds"])]
            cells += [_gb(row["shard_bytes"]), _gb(row["build_peak_bytes"])]
        rows.append([str(cell) for cell in cells])
    imports = [row["imports_seconds"] for row in data["rows"]]
    notes = [f"\nImports before the plan: {min(imports):.1f} to {max(imports):.1f} s."]
    for key, line in data.get("growth", {}).items():
        if key.endswith("seconds"):
            notes.append(f"`{key}`: {1000 * line['per_layer']:.0f} ms a layer, bend {line['bend']:.2f}.")
    return [*_table(head, rows), *notes]


def weights(data: dict[str, Any]) -> list[str]:
    rows = []
    for row in data["transfers"]:
        ratio = "" if "ratio_to_copy" not in row else f"{row['ratio_to_copy']:.2f}"
        read = "" if "read_bytes" not in row else f"{row['read_bytes'] / row['shard_bytes']:.3f}"
        size = row.get("shard_bytes", data["bytes"])
        peak = "" if "peak_bytes" not in row else _gb(row["peak_bytes"])
        rows.append([row["what"], _gb(size), _seconds(row["seconds"]), ratio, peak, read])
    head = ["", "bytes", "time", "time / `cp`", "peak memory above imports", "bytes read / bytes of the shards"]
    return _table(head, rows)


def primitives(data: dict[str, Any]) -> list[str]:
    rows = []
    for name, row in data["primitives"].items():
        added = f"{row['milliseconds_added_per_layer']:.1f} ms"
        rows.append([f"`{name}`", str(row["records"]), f"{row['microseconds_per_record']:.0f} us", added])
    return _table(["schedule", "calls", "one call", "added to the plan, per layer"], rows)


def step_time(data: dict[str, Any]) -> list[str]:
    low, high = data["ratio_quartiles"]
    options = data["options"]
    text = (
        f"TP {options['tp']}, shape `{options['shape']}`: megasched takes {data['ratio_median']:.3f} of native's "
    )
    return [f"{text}time (quartiles {low:.3f} to {high:.3f})."]


def memory_plan(data: dict[str, Any]) -> list[str]:
    """One row per configuration: its rank that is furthest off."""
    worst: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in data["rows"]:
        key = row["model"], row["layout"], row["flags"]
        if key not in worst or abs(row["error"]) > abs(worst[key]["error"]):
            worst[key] = row
    rows = [
        [model, layout, f"`{flags}`" if flags else "", f"{row['measured'] / 1e6:.1f} MB", f"{row['error']:+.2%}"]
        for (model, layout, flags), row in worst.items()
    ]
    return _table(["model", "layout", "flags", "measured", "predicted beside it"], rows)


def plan_time(data: dict[str, Any]) -> list[str]:
    cores = f"time on {data['machine']['cores']} cores"
    rows = []
    for row in data["plans"]:
        seconds = [_seconds(row[key]) for key in ("wall_seconds", "cpu_seconds")]
        job = [row["shape"], str(row["gpus"]), str(row["max_cp"]), str(row["fitting"])]
        rows.append([*job, *seconds, _gb(row["peak_bytes"])])
    return _table(["shape", "GPUs", "largest CP", "layouts that fit", cores, "CPU time", "memory"], rows)


def start_up(data: dict[str, Any]) -> list[str]:
    torch = data["start_up"]["import torch"]["median"]
    rows = [
        [f"`{name}`", f"{taken['median']:.1f} s", f"{taken['median'] / torch:.2f}"]
        for name, taken in data["start_up"].items()
    ]
    return _table(["", "CPU time", "of that of `import torch`"], rows)


def tune_replay(data: dict[str, Any]) -> list[str]:
    rows = []
    for name, found in data["replays"].items():
        shares = [f"{found[key]:.0%}" for key in ("within_1_percent", "optimum")]
        counted = (found[f"{key}_trials_to_1_percent"] for key in ("median", "most"))
        trials = ["-" if number is None else f"{number:.0f}" for number in counted]
        rows.append([name, str(found["searches"]), *shares, f"{found['worst_gap']:.1%}", *trials])
    head = ["search", "searches", "within 1 %", "optimum", "furthest off", "trials to 1 %: median", "most"]
    return _table(head, rows)


def published_runs(data: dict[str, Any]) -> list[str]:
    rows = []
    for row in data["published"]:
        cells = [row["model"], row["gpus"], row["global_batch_size"], row["layout"], f"{row['published']:,.0f}"]
        fits = row["predicted"] is not None
        cells += [f"{row['predicted']:,}", f"{row['error']:+.1%}"] if fits else ["does not fit", ""]
        cells.append(f"{row['place']} of {row['of']}" if row["place"] else "-")
        rows.append([str(cell) for cell in cells])
    head = ["model", "GPUs", "sequences in a step", "layout", "tokens/s/GPU", "predicted", "", "place"]
    return _table(head, rows)


def numerics(data: dict[str, Any]) -> list[str]:
    """Errors in multiples of the yardstick: logits, gradients."""
    runs = {"": data["numerics"]["without_te"], ", TE": data["numerics"]["with_te"]}
    columns = [(level, te) for te in runs for level in ("leaf", "fused", "block")]
    families = dict.fromkeys(case.split(":")[0] for case in runs[""])
    rows = [
        [f"`{family}`", *(_multiples(runs[te].get(f"{family}:{level}")) for level, te in columns)]
        for family in families
    ]
    in_8_bits = [case.split(":") for case in runs[", TE"] if case.count(":") == 2 and ":fused:" in case]
    rows_8_bits = []
    for family, _, recipe in in_8_bits:
        ours, block = (runs[", TE"][f"{family}:{level}:{recipe}"] for level in ("fused", "block"))
        pairs = [f"{ours[what][0]:.3f} ({block[what][0]:.3f})" for what in ("logits", "gradients")]
        rows_8_bits.append([f"`{family}`", f"`{recipe}`", *pairs])
    head = ["8 bits", "recipe", "logits of fused (of block)", "gradients of fused (of block)"]
    return [
        *_table(["bf16", *(f"{level}{te}" for level, te in columns)], rows),
        "",
        *_table(head, rows_8_bits),
    ]


def _multiples(case: dict[str, Any] | None) -> str:
    pairs = [case[what] for what in ("logits", "gradients")] if case else []
    return ", ".join(f"{ours / theirs:.2f}" for ours, theirs in pairs)


TABLES: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "layouts": trainers,
    "tokens_per_second": contenders,
    "configurations": memory_plan,
    "plans": plan_time,
    "start_up": start_up,
    "rows": construction,
    "primitives": primitives,
    "ratio_median": step_time,
    "replays": tune_replay,
    "published": published_runs,
    "transfers": weights,
    "layers": kernels,
    "numerics": numerics,
}


def fill(page: str, folder: Path = machine.RESULTS) -> str:
    """The page with every table made anew from its results file."""

    def made(found: re.Match[str]) -> str:
        data = json.loads((folder / found[2]).read_text())
        kind = next(key for key in TABLES if key in data)
        return "\n".join([found[1], *TABLES[kind](data), "", found[3]])

    return _PLACE.sub(made, page)


def _ratio(found: dict[str, float] | None) -> str:
    if found is None:
        return ""
    if "low_quartile" not in found:
        return f"{found['median']:.3f}"
    return f"{found['median']:.3f} ({found['low_quartile']:.3f} to {found['high_quartile']:.3f})"


def _left_out(data: dict[str, Any]) -> list[str]:
    return [f"\nLeft out: `{name}`, {reason}." for name, reason in data["left_out"].items()]


def _seconds(value: float) -> str:
    return f"{value:.1f} s"


def _gb(value: float) -> str:
    return f"{value / 1e9:.2f} GB"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text()))
