"""The page of ``megasched show --html`` in a real browser (`make browser-test`)."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from megasched.cli.page.html import write_page
from megasched.cli.page.page import build_page
from megasched.cli.show.modules import Asked
from megasched.planner.pipeline import Chunk
from tests.browser.chromium import Chromium
from tests.cli.pages import HOSTILE, hostile_page, page_of, predicted, report_of

pytestmark = pytest.mark.browser
SPANS = "document.querySelectorAll('#lanes .span').length"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    chromium = Chromium(tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.close()


@pytest.fixture
def shown(browser, tmp_path):
    """Opens a page; afterwards the browser has reported no error and asked for nothing but the page."""
    opened = []

    def show(page):
        path = tmp_path / "page.html"
        write_page(page, path)
        browser.events.clear()
        browser.open(path.as_uri())
        browser.settled()
        opened.append(path.as_uri())
        return browser

    yield show
    browser.value("1")  # whatever was reported until now has arrived
    asked = [
        e["params"]["request"]["url"] for e in browser.events if e.get("method") == "Network.requestWillBeSent"
    ]
    assert [url for url in asked if not url.startswith("data:")] == opened
    errors = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
    assert [event for event in browser.events if event.get("method") in errors] == []


def whole_step(browser):
    """A long pipeline opens at its warm-up."""
    browser.value("document.getElementById('zoom-all').click()")
    browser.settled()


def point(browser, rank, microbatch):
    """The middle of the first span of a micro-batch on a rank's lane."""
    x, y = browser.value(
        f"""(() => {{
          const lane = document.querySelector('.lane[data-rank="{rank}"]');
          const text = [...lane.querySelectorAll('.number')].find((one) => one.textContent === '{microbatch}');
          const box = text.getBoundingClientRect();
          return [box.x + box.width / 2, box.y + box.height / 2];
        }})()"""
    )
    return x, y


def test_every_forward_and_backward_is_there(shown):
    browser = shown(page_of(pp=2, vpp=2, microbatches=4))
    whole_step(browser)
    assert browser.value(SPANS) == 2 * 2 * 4 * 2
    assert browser.value("document.querySelectorAll('#lanes .forward').length") == 16
    assert browser.value("document.querySelectorAll('#lanes .lane').length") == 2


def test_hovering_tells_what_it_is(shown):
    browser = shown(page_of(pp=2, vpp=1, microbatches=4))
    x, y = point(browser, 1, 0)
    browser.mouse("mouseMoved", x, y)
    tip = browser.value("document.getElementById('tip').innerText")
    # The first forward of rank 0 takes 1, that of rank 1 begins after it.
    assert tip.splitlines() == [
        "pp 1, predicted: forward",
        "micro-batch 0, chunk 0",
        "1.000 to 2.000, takes 1.000",
    ]
    assert browser.value("document.querySelectorAll('#lanes .chosen').length") == 1
    browser.mouse("mouseMoved", 2, 2)
    assert browser.value("document.getElementById('tip').hidden") is True


def test_zoom_and_pan_by_button_wheel_key_and_mouse(shown):
    browser = shown(page_of(pp=2, vpp=1, microbatches=8))
    whole_step(browser)
    everything = browser.value(SPANS)
    assert everything == 2 * 8 * 2

    def axis():
        browser.settled()
        return browser.value("[...document.querySelectorAll('#lanes text.soft')].map((one) => one.textContent)")

    whole = axis()
    browser.value("document.getElementById('zoom-in').click()")
    zoomed = axis()
    assert zoomed != whole
    assert browser.value(SPANS) < everything
    x, y = browser.value("(() => { const b = lanes.getBoundingClientRect(); return [b.x + 600, b.y + 35]; })()")
    browser.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
    browser.mouse("mouseMoved", x + 100, y, button="left", buttons=1)
    browser.mouse("mouseReleased", x + 100, y, button="left", clickCount=1)
    assert axis() != zoomed
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-200, modifiers=2)
    assert browser.value("scrollY") == 0
    browser.value("document.getElementById('lanes').focus()")
    browser.send("Input.dispatchKeyEvent", type="keyDown", key="0", text="0")
    assert axis() == whole
    assert browser.value(SPANS) == everything


def test_names_are_text_and_nothing_else(shown):
    browser = shown(hostile_page())
    assert browser.value("window.pwned") is None
    assert HOSTILE in browser.value("document.body.textContent")
    assert browser.value("document.querySelectorAll('img, #owned').length") == 0


def test_of_hundred_thousand_spans_few_elements_are_drawn(shown):
    """Which is what keeps it fast."""
    chunks = [[Chunk(1.0, 2.0)] * 8] * 16
    page = page_of(pp=16, vpp=8, microbatches=512, prediction=predicted(chunks))
    assert len(page.predicted) == 131_072
    browser = shown(page)
    whole_step(browser)
    elements = "document.querySelectorAll('#lanes *').length"
    assert browser.value(elements) < 20_000
    for _ in range(12):
        browser.value("document.getElementById('zoom-in').click()")
        browser.settled()
        assert browser.value(elements) < 20_000
    assert 0 < browser.value(SPANS) < 1000


def test_dark_and_printed(shown, tmp_path):
    browser = shown(page_of(pp=2, vpp=1, microbatches=4))
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    light = browser.value(ground)
    browser.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    dark = browser.value(ground)
    browser.send("Emulation.setEmulatedMedia", features=[])
    assert sum(map(int, re.findall(r"\d+", light)[:3])) > 700 > 120 > sum(map(int, re.findall(r"\d+", dark)[:3]))
    assert browser.send("Page.printToPDF", printBackground=True)["data"].startswith("JVBERi")
    assert browser.value("document.querySelectorAll('details:not([open])').length") == 0


def linked_page():
    """Of one call on all layers; its line is the first of this file."""
    report = report_of(2, 2)
    asked = (Asked("shard", "shard()", f"{__file__}:1"),)
    modules = [replace(one, asked=asked) if one.path.endswith("proj") else one for one in report.modules]
    return build_page(replace(report, modules=modules, schedule="schedule.py"))


def test_a_link_opens_what_is_folded_and_is_reached_by_keys(shown):
    browser = shown(linked_page())
    browser.value("document.getElementById('fold').click()")
    browser.value("document.querySelector('#line-0-1 a').focus()")
    for kind in ("keyDown", "keyUp"):
        enter = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        browser.send("Input.dispatchKeyEvent", type=kind, **enter)
    browser.settled()
    there = "document.querySelector(':target')"
    assert browser.value(f"{there}.innerText").startswith("proj Linear")
    assert browser.value(f"{there}.checkVisibility()")
    assert browser.value(f"getComputedStyle({there}).outlineStyle") == "solid"
    assert browser.value(f"{there}.querySelector('a').click() ?? location.hash") == "#line-0-1"


# Text and the ratio of its luminance to that of its ground, as WCAG has it, where the ratio is below 4.5.
CONTRAST = """(() => {
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  const luminance = (rgb) => rgb.slice(0, 3).map((one) => one / 255)
    .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
    .reduce((sum, one, i) => sum + one * [0.2126, 0.7152, 0.0722][i], 0);
  const over = (top, share, ground) => top.slice(0, 3).map((one, i) => one * share + ground[i] * (1 - share));
  const ground = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const colour = numbers(getComputedStyle(one).backgroundColor);
      if ((colour[3] ?? 1) === 1) return colour;
    }
    return numbers(getComputedStyle(document.documentElement).backgroundColor);
  };
  const low = [];
  const check = (element, colour, behind) => {
    const [light, dark] = [luminance(colour), luminance(behind)].sort((a, b) => b - a);
    const ratio = (light + 0.05) / (dark + 0.05);
    if (ratio < 4.5) low.push([element.textContent.trim().slice(0, 40), ratio]);
  };
  for (const element of document.body.querySelectorAll("*:not(script):not(style):not(svg *)"))
    if ([...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim()))
      check(element, numbers(getComputedStyle(element).color), ground(element));
  for (const text of document.querySelectorAll("#lanes .number")) {
    const span = text.previousElementSibling, style = getComputedStyle(span);
    const behind = over(numbers(style.fill), Number(style.fillOpacity), ground(document.documentElement));
    check(text, numbers(getComputedStyle(text).fill), behind);
  }
  return low;
})()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("linked", [False, True])
def test_text_stands_out_from_its_ground(shown, scheme, linked):
    """Of a page whose chunks are predicted, and of one with a schedule whose link was followed."""
    browser = shown(
        linked_page() if linked else page_of(2, 2, 4, prediction=predicted([[Chunk(1.0, 2.0)] * 2] * 2))
    )
    browser.value("document.querySelector('#line-0-1 a')?.click()")
    browser.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.settled()
    low = browser.value(CONTRAST)
    browser.send("Emulation.setEmulatedMedia", features=[])
    assert low == []
