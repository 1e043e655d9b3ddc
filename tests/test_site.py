"""The documentation as a site: it builds, links lead somewhere, and what is made from the code is current."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest
import yaml

from megasched.cli import main
from megasched.errors import ConfigError
from megasched.planner.hardware.hardware import load_hardware
from megasched.trainer.flags.arguments import FLAGS

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "figures"


def build(folder: Path, checkout: Path = ROOT) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(words, cwd=checkout, env=quiet, capture_output=True, text=True, check=False)


class Words(HTMLParser):
    """Collects the text of a page, with one space between words."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page.read_text())
        self.text = " ".join(" ".join(self.found).split())

    def handle_data(self, data):
        self.found.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Links(HTMLParser):
    """Collects what a page refers to, and the anchors in it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets, self.anchors = [], set()
        self.feed(page.read_text())

    def handle_starttag(self, tag, attrs):
        held = dict(attrs)
        self.anchors.add(held.get("id"))
        self.targets += [held[name] for name in ("href", "src") if held.get(name)]


def test_every_link_leads_somewhere_and_nothing_is_fetched(site):
    pages = {page: Links(page) for page in site.rglob("*.html") if page.name != "404.html"}
    assert len(pages) > 25
    for page, links in pages.items():
        for target in links.targets:
            address = urlparse(target)
            if address.scheme or address.netloc:
                assert address.scheme in ("https", "http", "data", "mailto")
                continue
            file = (page.parent / unquote(address.path)).resolve() if address.path else page
            file = file / "index.html" if file.is_dir() else file
            assert file.exists(), f"{page.name}: {target}"
            if address.fragment and file in pages:
                assert unquote(address.fragment) in pages[file].anchors, f"{page.name}: {target}"
    loaded = re.compile(r"<(?:script|link|img|source)[^>]+(?:src|href|srcset)=\"(?:https?:)?//")
    for page in pages:
        assert not loaded.search(page.read_text()), page.name


def test_every_page_is_in_llms_txt_with_what_it_is_for(site):
    text = (site / "llms.txt").read_text()
    for page in site.glob("*.html"):
        if page.name != "404.html":
            assert re.search(rf"\]\({re.escape(page.name)}\): \S.{{15,}}", text), page.name


def test_every_command_has_a_section(site, capsys):
    text = (site / "commands.html").read_text()
    with pytest.raises(SystemExit):
        main.main(["--help"])
    names = re.findall(r"^  ([a-z][a-z-]+)  ", capsys.readouterr().out, re.MULTILINE)
    assert {"show", "verify", "doctor"} <= set(names)
    for name in names:
        assert re.search(rf'<h2 id="{name}\b', text), name


def test_every_flag_is_in_the_reference_with_its_class(site):
    text = Words(site / "flags.html").text
    for flag in FLAGS:
        assert f"{flag} " in text, flag
    for row in (
        "--tensor-model-parallel-size honoured layout of the ranks",
        "--num-layers derived the HF config says it",
        "--use-flash-attn idle Megatron reads it nowhere; say --attention-backend flash",
        "--use-torch-fsdp2 refused FSDP shards Megatron's own layers",
    ):
        assert row in text, row


def test_messages_are_in_the_index_of_errors(site):
    """Of each form in which the code has them."""
    text = Words(site / "errors.html").text
    for message in (
        "there is no such folder; as a hub id, it is not in",
        "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)",
    ):
        assert message in text, message
    with pytest.raises(ConfigError) as raised:
        load_hardware("h999")
    start, _, end = str(raised.value).partition("h999")
    assert start in text
    assert end[end.rindex(";") :] in text


def test_the_index_of_errors_leaves_no_folder_out():
    index = runpy.run_path(str(ROOT / "docs" / "site" / "errors.py"))
    for folder in ("megasched", "launch", "model_adapters", "patches"):
        for file in (ROOT / folder).rglob("*.py"):
            path = file.relative_to(ROOT).as_posix()
            if any(index["messages"](file.read_text())):
                assert any(path == one or path.startswith(f"{one}/") for one in index["SUBJECTS"]), path


def test_public_names_are_in_the_reference(site):
    import megasched

    text = (site / "api.html").read_text()
    for name in set(megasched.__all__) - {"Layout"}:
        assert re.search(rf'id="megasched\.[\w.]+\.{name}"', text), name


def test_a_link_that_leads_nowhere_is_an_error(tmp_path):
    for name in ("docs", "megasched"):
        (tmp_path / name).mkdir()
    shutil.copytree(ROOT / "docs" / "site", tmp_path / "docs" / "site")
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        (tmp_path / name).write_text(f"# {name}\n\nWords that are there for the list of pages.\n")
    config = yaml.unsafe_load((ROOT / "mkdocs.yml").read_text())
    config["nav"] = [{"Home": "index.md"}, {"Page": "page.md"}]
    config["plugins"] = ["search"]
    config["hooks"] = ["docs/site/outside.py"]
    del config["markdown_extensions"]
    (tmp_path / "mkdocs.yml").write_text(yaml.dump(config))
    page = tmp_path / "docs" / "page.md"
    page.write_text("# Page\n\n[home](../README.md), [us](../CONTRIBUTING.md)\n")
    told = build(tmp_path / "built", tmp_path)
    assert "contributing.md" in told.stdout + told.stderr  # a page that the navigation lacks
    page.write_text("# Page\n\n[home](../README.md#nothing), [nothing](nothing.md)\n")
    told = build(tmp_path / "built", tmp_path)
    assert told.returncode != 0
    assert "nothing.md" in told.stdout + told.stderr


def test_figures_are_as_they_are_drawn():
    drawn = runpy.run_path(str(ROOT / "docs" / "site" / "draw.py"))["draw"]()
    assert {file.name: file.read_text() for file in FIGURES.iterdir()} == drawn


def test_the_readme_is_short():
    """One screen and a half is what a newcomer reads."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 140
