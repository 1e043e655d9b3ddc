"""The page as a parser of HTML reads it: well formed, self-contained, and names are nothing but text."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import html5lib
import pytest

from megasched.cli.output import format_bytes
from megasched.cli.page.compare import StepComparison
from megasched.cli.page.html import render, write_page
from megasched.cli.page.page import build_page
from megasched.cli.show.modules import Asked, ModuleReport
from megasched.errors import ConfigError
from megasched.planner.hardware.hardware import load_hardware
from megasched.planner.pipeline import Chunk
from megasched.planner.step_time import StepTime
from tests.cli.pages import HOSTILE, TIME, hostile_page, page_of, predicted, report_of

H100 = load_hardware("h100-80gb")
OUTSIDE = re.compile(r"(?:https?:)?//|@import|url\((?!#)|\bfetch\b|XMLHttp|WebSocket|import\(", re.IGNORECASE)


def parse(text):
    """The tree of a page; a fault that a browser would mend is one here."""
    return html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(text)


def text_of(element):
    return " ".join("".join(element.itertext()).split())


def timeline(tree):
    return json.loads(tree.find(".//script[@id='spans']").text)


def on_h100(pp=2, total=TIME, **more):
    """A step of ``pp`` stages, as predicted; by default of one second."""
    return page_of(pp, 1, 4, prediction=predicted([[Chunk(1.0, 2.0)]] * pp, total), hardware=H100, **more)


def one_stage():
    """The same in three quarters of the time, without a bubble."""
    return on_h100(1, StepTime(0.5, 0.25, 0.0, 0.0, 0.0), tokens=900.0)


PAGES = {
    "one rank": lambda: render(page_of(1, 1, 2)),
    "interleaved": lambda: render(page_of(2, 2, 4)),
    "predicted": lambda: render(on_h100()),
    "compared": lambda: render(on_h100(), StepComparison(("TP2 x PP2", HOSTILE), (on_h100(), one_stage()), 4)),
    "hostile": lambda: render(hostile_page()),
}


@pytest.mark.parametrize("page", PAGES)
def test_it_is_well_formed_and_loads_nothing(page):
    text = PAGES[page]()
    tree = parse(text)
    policy = tree.find(".//meta[@http-equiv='Content-Security-Policy']").get("content")
    assert policy.startswith("default-src 'none'")
    for element in tree.iter():
        assert element.tag not in ("img", "iframe", "object", "embed", "base", "form")
        assert not [name for name in element.attrib if name.startswith("on") or name == "src"]
        link = element.get("href", "#")
        assert link.startswith("#") or link == "data:,"
    for element in [*tree.iter("style"), *(one for one in tree.iter("script") if not one.get("id"))]:
        assert set(OUTSIDE.findall(element.text.replace("http://www.w3.org/2000/svg", ""))) <= {"//"}  # comments
    assert len(list(tree.iter("script"))) == 2


def test_labels_and_headings_are_there():
    tree = parse(render(page_of(2, 2, 4)))
    ids = {element.get("id") for element in tree.iter() if element.get("id")}
    for element in tree.iter():
        assert element.get("aria-labelledby", "lanes") in ids
        assert element.tag != "button" or text_of(element)
        assert element.tag != "th" or element.get("scope") in ("row", "col")
        assert element.get("role") != "img" or element.get("aria-label")
    assert tree.find(".//html") is None
    assert tree.get("lang") == "en"
    assert [text_of(one) for one in tree.iter("h2")] == [
        *("A step in time", "Stages", "Memory of a rank", "Communication", "Modules")
    ]


def test_hostile_names_are_text():
    tree = parse(render(hostile_page()))
    assert text_of(tree.find(".//h1")) == " ".join(HOSTILE.split())
    assert timeline(tree)["names"] == [HOSTILE]
    assert not [element for element in tree.iter() if element.get("id") == "owned"]


def test_the_data_of_the_timeline_are_the_spans():
    page = page_of(2, 2, 4)
    data = timeline(parse(render(page)))
    assert [(lane["rank"], lane["source"]) for lane in data["lanes"]] == [(0, "predicted"), (1, "predicted")]
    for lane in data["lanes"]:
        time, found = 0, []
        for i in range(0, len(lane["spans"]), 6):
            kind, microbatch, chunk, gap, length, _ = lane["spans"][i : i + 6]
            start, time = time + gap, time + gap + length
            found.append((data["kinds"][kind], microbatch, chunk, start * data["tick"], time * data["tick"]))
        assert found == [
            (s.kind, s.microbatch, s.chunk, pytest.approx(s.start, abs=1e-6), pytest.approx(s.end, abs=1e-6))
            for s in page.predicted
            if s.rank == lane["rank"]
        ]


def test_numbers_for_those_who_do_not_see_the_picture():
    tree = parse(render(page_of(2, 1, 4)))
    rows = [[text_of(cell) for cell in row] for row in tree.find(".//section[@id='timeline']").iter("tr")]
    # Two stages of 1 + 2, 4 micro-batches: 12 of 15 are work; 1F1B keeps two on the first rank.
    assert rows[1:] == [
        ["pp 0", "predicted", "4", "4", "80.0 %", "2"],
        ["pp 1", "predicted", "4", "4", "80.0 %", "1"],
    ]


def test_bars_are_in_proportion():
    """Of a rank, to the memory of a GPU; of a stage, to the largest stage."""
    tree = parse(PAGES["predicted"]())
    bars = [one for one in tree.iter("span") if one.get("class") == "bar"]
    assert [one.get("aria-label") for one in bars] == [
        "stage 0: 1.00 GiB; parameters 256.0 MiB, gradients 512.0 MiB, activations 256.0 MiB",
        "stage 1: 896.0 MiB; parameters 256.0 MiB, gradients 512.0 MiB, activations 128.0 MiB",
        "pp 0: 1.50 GiB; parameters 1.00 GiB, activations 512.0 MiB",
        "pp 1: 1.50 GiB; parameters 1.00 GiB, activations 512.0 MiB",
    ]
    assert [part.get("style") for part in bars[0]] == ["width: 25.000%", "width: 50.000%", "width: 25.000%"]
    room = H100.usable_bytes / 2**30
    assert [part.get("style") for part in bars[2]] == [
        f"width: {100 / room:.3f}%",
        f"width: {50 / room:.3f}%",
        "left: 100.000%",
    ]


def test_every_colour_has_its_name():
    tree = parse(PAGES["predicted"]())
    for section in ("stages", "memory"):
        (shown,) = tree.findall(f".//section[@id='{section}']")
        colours = {i.get("class").split()[-1] for i in shown.iter("i") if "part" in i.get("class").split()}
        named = {i.get("class").split()[-1] for li in shown.find("ul").iter("li") for i in li.iter("i")}
        assert colours <= named


def test_figures_stand_on_top():
    """What the planner predicts on the hardware that is named; without it nothing is guessed."""

    def told(text):
        found = parse(text).find(".//dl[@class='figures']")
        return [[text_of(one) for one in div] for div in found]

    assert told(PAGES["predicted"]()) == [
        ["Step time", "1.00 s", "on H100 SXM 80 GB, 4 sequences"],
        ["Pipeline bubble", "25.0%", "of the step the busiest rank waits"],
        ["Tokens/s per GPU", "1,000", "on H100 SXM 80 GB"],
        ["Peak memory of a GPU", "1.50 GiB", "fits into the 75.1 GiB for tensors"],
    ]
    unknown = ["not known", "name the hardware with --gpu"]
    assert told(render(page_of(2, 1, 4))) == [
        ["Step time", *unknown],
        ["Pipeline bubble", "20.0%", "by FLOPs, without communication"],
        ["Tokens/s per GPU", *unknown],
        ["Peak memory of a GPU", "not known", ""],
    ]
    assert told(render(page_of(2, 1, 4, why_not="it computes by values", hardware=H100)))[0] == [
        "Step time",
        "not known",
        "it computes by values",
    ]


def test_two_layouts_stand_side_by_side():
    """Figure by figure, with the difference; the ranks of both on one scale, on the same page."""
    (shown,) = parse(PAGES["compared"]()).findall(".//section[@id='compared']")
    rows = {text_of(row[0]): [text_of(cell) for cell in row[1:]] for row in shown.find(".//tbody")}
    assert rows == {
        "GPUs": ["4", "2", "-2"],
        "Micro-batches in a step": ["4", "4", "same"],
        "Step time": ["1.00 s", "750.00 ms", "-250.00 ms (-25.0%)"],
        "Pipeline bubble": ["25.0%", "0.0%", "-25.0 points"],
        "Tokens/s per GPU": ["1,000", "1,200", "+200 (+20.0%)"],
        "Peak memory of a GPU": ["1.50 GiB", "1.50 GiB", "same"],
        "of the 75.1 GiB for tensors": ["2.0%", "2.0%", "same"],
        # A hidden state of 128 tokens by 32 values of two bytes: forward, and its gradient, 4 micro-batches.
        "Sent over PP, send": ["64.0 KiB", "0 B", "-64.0 KiB (-100.0%)"],
    }
    bars = [one.get("aria-label").split(";")[0] for one in shown.iter("span") if one.get("class") == "bar"]
    assert bars == ["pp 0: 1.50 GiB", "pp 1: 1.50 GiB", "pp 0: 1.50 GiB"]
    titles = [text_of(one) for one in shown.iter("h3")]
    assert titles == ["Memory of a rank, TP2 x PP2", f"Memory of a rank, {' '.join(HOSTILE.split())}"]


def test_layers_alike_are_one_line_in_the_tree():
    text = render(page_of(16, 8, 16))
    tree = parse(text)
    lines = [text_of(line) for line in tree.find(".//ul[@class='tree']").iter("summary")]
    assert lines == ["Model", "layers ModuleList", "layers.0-127 ×128 Layer"]
    grid = next(table for table in tree.iter("table") if table.get("class") == "grid")
    assert len(list(grid.iter("td"))) == 128
    assert len(text) < 300_000


def test_a_page_of_a_real_model(inspect, tmp_path):
    path = tmp_path / "page.html"
    write_page(build_page(inspect(tp=2, sp=True, pp=2, vp=2)), path)
    text = text_of(parse(path.read_text()))
    for word in (
        "LlamaForCausalLM",
        "weight [32, 32] → [16, 32]",
        "mysched.py:5",
        "all_gather",
        "×4",
        "model.norm",
    ):
        assert word in text


def test_modules_and_lines_of_the_schedule_lead_to_each_other(inspect, write):
    """Each link has its way back; a comment is only text; a file that is gone has no links."""
    cut = 'sch["model.layers.0"].cut_pipeline_stage()'
    report = inspect(f"# {HOSTILE}", cut, tp=2, pp=2)
    text = render(build_page(report))
    tree = parse(text)
    ids = {one.get("id"): one for one in tree.iter() if one.get("id")}
    assert "owned" not in ids
    lines = {key: text_of(one[1]) for key, one in ids.items() if key.startswith("line-")}
    source = Path(write(f"# {HOSTILE}", cut)).read_text()
    assert list(lines.values()) == [" ".join(line.split()) for line in source.splitlines()]

    def links(element):
        return [(one.get("href").removeprefix("#"), text_of(one)) for one in element.iter("a")]

    there = {
        (key, target) for key, one in ids.items() for target, _ in links(one) if re.match(r"module-|stage-\d", key)
    }
    back = {(target, key) for key in lines for target, _ in links(ids[key])}
    assert there == back
    folds = [f"model.layers.0-3.self_attn.{name}_proj" for name in "qkv"]
    assert [name for _, name in links(ids["line-0-5"])] == folds
    for target, _ in links(ids["line-0-5"]):
        assert (links(ids[target])) == [("line-0-5", "mysched.py:5")]
    assert links(ids["line-0-12"]) == [("stage-0", "stage 0")]
    assert not links(ids["line-0-1"])
    Path(report.records[0].source.rpartition(":")[0]).unlink()
    gone = parse(render(build_page(report)))
    assert "mysched.py:5" in text_of(gone)
    assert gone.find(".//section[@id='schedule']") is None


def test_layers_as_others_have_the_lines_of_all_inside():
    """Such a line stands for modules that are not shown, and a link back must lead somewhere."""
    asked = (Asked("checkpoint", "checkpoint()", f"{__file__}:1"),)
    report = report_of(2, 1)
    inside = [
        ModuleReport(f"layers.{layer}.mlp{name}", "Module", "Module", asked=asked if name else ())
        for layer in (0, 1)
        for name in ("", ".proj")
    ]
    changed = [replace(one, recompute=one.path == "layers.1") for one in report.modules] + inside
    tree = parse(render(build_page(replace(report, modules=changed, schedule="file.py"))))
    (first,) = [one for one in tree.iter("tr") if one.get("id") == "line-0-1"]
    assert [text_of(one) for one in first.iter("a")] == ["layers.0.mlp.proj", "layers.1.mlp"]
    assert "mlp as in layers.0 test_html.py:1" in text_of(tree.find(".//ul[@class='tree']"))


def test_a_folder_whose_name_is_no_utf8_is_named_by_its_bytes(tmp_path):
    page = page_of(1, 1, 1)
    write_page(replace(page, report=replace(page.report, hf_model=os.fsdecode(b"m\xff"))), tmp_path / "page.html")
    assert "<dd>m\\udcff</dd>" in (tmp_path / "page.html").read_text()


def test_where_it_can_not_be_written(tmp_path):
    with pytest.raises(ConfigError, match=r"--html .*absent.page.html: it can't be written: No such file"):
        write_page(page_of(1, 1, 1), tmp_path / "absent" / "page.html")


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (80 * 2**30, "80.0 GiB")]
)
def test_bytes(count, text):
    assert format_bytes(count) == text
