"""The tables of docs/benchmarks.md."""

import json
from pathlib import Path

import tables


def test_the_page_shows_what_the_results_say() -> None:
    page = tables.PAGE.read_text()
    assert tables.fill(page) == page, "make them anew: python bench/tables.py"


def test_every_result_is_on_the_page() -> None:
    page = tables.PAGE.read_text()
    assert [
        path.name for path in tables.machine.RESULTS.glob("*.json") if f"<!-- {path.name} -->" not in page
    ] == []


def test_a_table_is_filled_in_place(tmp_path: Path) -> None:
    row = {"records": 4, "microseconds_per_record": 10.4, "milliseconds_added_per_layer": 1.25}
    (tmp_path / "p.json").write_text(json.dumps({"primitives": {"shard": row}}))
    page = "before\n<!-- p.json -->\nold\n<!-- end -->\nafter\n"
    filled = tables.fill(page, tmp_path)
    assert filled.startswith("before\n<!-- p.json -->\n\n| schedule |")
    assert "| `shard` | 4 | 10 us | 1.2 ms |" in filled
    assert filled.endswith("\n<!-- end -->\nafter\n")
    assert "old" not in filled
    assert tables.fill(filled, tmp_path) == filled


def test_a_contender_without_a_ratio_has_an_empty_cell() -> None:
    spread = {"median": 2.0, "low_quartile": 1.0, "high_quartile": 3.0}
    data = {
        "tokens_per_second": {"native": 10.0, "ours": 20.0},
        "seconds": {"native": spread, "ours": spread},
        "speed_relative_to": {"native": {"ours": spread}, "hf_eager": {}},
        "peak_bytes": {"native": 1e9, "ours": 2e9},
        "emulation": {"native": {"calls": 5, "seconds": 0.02}},
        "left_out": {"hf_liger": "not installed"},
    }
    lines = tables.contenders(data)
    assert lines[2] == "| `native` | 10 |  |  | 1.00 GB | 1.00% |"
    assert lines[3] == "| `ours` | 20 | 2.000 (1.000 to 3.000) |  | 2.00 GB |  |"
    assert "hf_liger" in lines[-1]
