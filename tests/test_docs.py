"""README and docs: links lead somewhere, names exist, code runs, and what is shown is what the commands print.

Fenced blocks are read by their language:

* ``python`` in library.md, adapters.md, add-an-architecture.md, graphs.md, slapo.md, tune.md and verify.md runs,
  block after block in one namespace; a ``text`` block right after it is what it prints. With ``ranks=2`` it runs
  on so many ranks, by itself.
* ``python`` in schedules.md is a schedule: it is planned for a small Qwen3 at TP 2. A first line ``# name.py``,
  or ``title="name"`` on the fence, saves a block under this name for the commands below.
* ``console`` is a ``megasched`` command and what it prints, where ``...`` stands for anything.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import re
import shlex
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import yaml

from megasched.cli import main
from megasched.launch.quickstart.corpus import write_tokenizer
from tests import tiny
from tests.pages.blocks import FENCE, blocks, shows

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
FORMS = [path for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")) if path.name != "config.yml"]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*\*?")

# Of other people's programs, as far as the pages show them.
OTHER_FLAGS = {"--ntasks-per-node", "--cpus-per-task", "--test-only", "--qos", "--kill-on-bad-exit"}  # Slurm's
OTHER_FLAGS |= {"--input", "--output"}  # DeepSpeed's, up to an underscore
OTHER_FLAGS |= {"--build-arg", "--gpus", "--ipc", "--rm", "--ulimit"}  # Docker's
OTHER_FLAGS |= {"--extra"}  # uv's
OTHER_FLAGS |= {"--split-sentences"}  # of Megatron-LM's tools
# Of the scripts in bench/, which are no package.
BENCH_FLAGS = {
    flag
    for script in (ROOT / "bench").rglob("*.py")
    for flag in re.findall(r'add_argument\("(--[a-z-]+)"', script.read_text())
}


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_link_with_the_name_of_a_page_leads_to_that_page(page):
    for label, target in re.findall(r"\[([\w-]+\.md)\]\(([^)#\s]+)", prose(page)):
        assert Path(target).name == label, (label, target)


def test_the_public_names_are_those_that_library_md_lists():
    import megasched

    _, _, section = (ROOT / "docs" / "library.md").read_text().partition("## The public names")
    assert set(re.findall(r"`(\w+)`", section)) == set(megasched.__all__)


def test_every_patch_is_in_the_table_of_internals_md():
    from megasched import patches
    from megasched.trainer import seams

    table = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "internals.md").read_text(), re.MULTILINE)
    assert {patch.name for patch in [*patches.available(), *seams.available()]} <= set(table)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_in_code_spans_exist(page):
    for span in re.findall(r"`([\w./-]+)`", prose(page)):
        ours = span.startswith(("megasched/", "model_adapters/", "patches/", "launch/", "tests/", "examples/"))
        if ours or span in ("constraints.txt", "pyproject.toml", "setup.py"):
            assert (ROOT / span).exists(), span


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = page.read_text()
    named = re.findall(r"`make ([a-z-]+)", text) + re.findall(r"^make ([a-z-]+)", text, re.MULTILINE)
    assert set(named) <= targets


# ---- flags ------------------------------------------------------------------------------------------


def options(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


def megatron_parser() -> argparse.ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    from megasched.trainer.flags.arguments import add_megasched_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return add_megasched_arguments(parser)


@pytest.fixture(scope="module")
def training_parser() -> argparse.ArgumentParser:
    return megatron_parser()


def every_command(command):
    """A command, and all below it."""
    yield command
    for below in getattr(command, "commands", {}).values():
        yield from every_command(below)


@pytest.fixture(scope="module")
def known_flags(training_parser) -> set[str]:
    import typer
    from torch.distributed.run import get_args_parser

    from megasched.launch.quickstart import command as quickstart

    found = (
        OTHER_FLAGS
        | BENCH_FLAGS
        | options(training_parser)
        | options(get_args_parser())
        | options(quickstart._parser())
    )
    for command in every_command(typer.main.get_command(main.app)):
        found.update(option for parameter in command.params for option in parameter.opts)
        found.update(command.context_settings.get("help_option_names", ["--help"]))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_exist(page, known_flags):
    for flag in FLAG.findall(page.read_text()):
        matches = [known for known in known_flags if fnmatchcase(known, flag)]
        assert matches, f"{flag} is no flag of anything"


def test_megasched_commands_exist():
    import typer

    commands = set(typer.main.get_command(main.app).commands)
    for page in PAGES:
        code = [block.text for block in blocks(page) if block.language in ("bash", "console", "text")]
        lines = "\n".join([*code, *re.findall(r"`([^`\n]+)`", prose(page))])
        named = re.findall(r"^(?:\$ |python -m )?megasched ([a-z][a-z-]*)(?![\w.:])", lines, re.MULTILINE)
        assert set(named) <= commands, page.name


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_issue_forms_ask_for_what_there_is(form, known_flags):
    import typer

    content = yaml.safe_load(form.read_text())
    assert {"name", "description", "labels", "body"} == set(content)
    assert all(field["attributes"]["label"] for field in content["body"])
    assert len({field["id"] for field in content["body"]}) == len(content["body"])
    text = form.read_text()
    named = re.findall(r"`megasched ([a-z-]+)", text)
    assert named
    assert set(named) <= set(typer.main.get_command(main.app).commands)
    assert set(FLAG.findall(text)) <= known_flags


def test_every_flag_of_megasched_is_in_run_md():
    from megasched.trainer.flags.arguments import add_megasched_arguments

    own = options(add_megasched_arguments(argparse.ArgumentParser(add_help=False)))
    text = (ROOT / "docs" / "run.md").read_text()
    assert own <= set(re.findall(r"^\| `(--[a-z-]+)` \|", text, re.MULTILINE))


def test_flags_that_run_md_says_are_refused_are(training_parser):
    from megasched.trainer.flags.refused_flags import REFUSED

    section = (ROOT / "docs" / "run.md").read_text().partition("| not available |")[2].partition("\n\n")[0]
    flags = FLAG.findall(section)
    assert len(flags) > 15
    for flag in flags:
        dests = {a.dest for a in training_parser._actions for o in a.option_strings if fnmatchcase(o, flag)}
        assert any(fnmatchcase(dest, pattern) for dest in dests for pattern in REFUSED), flag


# ---- code -------------------------------------------------------------------------------------------


def run_code(code: str, namespace: dict) -> str:
    """Runs a block; what it prints, spaces at the ends of lines dropped."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "example.py", "exec"), namespace)
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines())


def run_code_on_a_rank(code: str) -> str:
    """As a script under torchrun; the process group is there already."""
    import torch

    start, torch.distributed.init_process_group = torch.distributed.init_process_group, lambda *_, **__: None
    try:
        return run_code(code, {"__name__": "__main__"})
    finally:
        torch.distributed.init_process_group = start


@pytest.fixture
def no_new_primitives(monkeypatch):
    """What a page registers is gone afterwards."""
    from megasched.graph import compilers
    from megasched.language import registry

    registry.get_lowering("checkpoint")  # the built-in ones are there to stay
    compilers.get_compiler("megatron")
    monkeypatch.setattr(registry, "_PRIMITIVES", dict(registry._PRIMITIVES))
    monkeypatch.setattr(registry, "_LOWERINGS", dict(registry._LOWERINGS))
    monkeypatch.setattr(compilers, "_COMPILERS", dict(compilers._COMPILERS))


@pytest.mark.parametrize(
    "page",
    ["library.md", "adapters.md", "add-an-architecture.md", "graphs.md", "slapo.md", "tune.md", "verify.md"],
)
def test_code_runs_and_prints_what_the_page_shows(page, ranks, monkeypatch, tmp_path, no_new_primitives):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "example"}
    ran = 0
    found = blocks(ROOT / "docs" / page)
    for block, after in itertools.zip_longest(found, found[1:]):
        if block.language != "python":
            continue
        on_ranks = re.fullmatch(r"ranks=(\d+)", block.info)
        if on_ranks:
            printed = ranks.run(int(on_ranks[1]), run_code_on_a_rank, block.text)[0]
        else:
            printed = run_code(block.text, namespace)
        shown = after.text.rstrip() if after and after.language == "text" and after.follows else ""
        assert printed == shown
        ran += 1
    assert ran >= 3


def test_the_adapter_shown_is_the_one_there_is():
    first = next(block for block in blocks(ROOT / "docs" / "adapters.md") if block.language == "python")
    assert first.text == (ROOT / "model_adapters" / "families" / "phi3.py").read_text()


# ---- schedules and commands -------------------------------------------------------------------------


def plan_schedule(code: str) -> int:
    """Plans a schedule for a small Qwen3 at TP 2; returns how many calls it makes."""
    from megasched.definition.build import build_definition
    from megasched.language.parallel_dims import ParallelDims
    from megasched.language.schedule import create_schedule
    from megasched.language.schedule_file import apply_schedule
    from megasched.layers.megatron.trials import Trials
    from megasched.lowering.lora import adapt_modules
    from megasched.lowering.replace import replace_modules
    from megasched.model_adapters.registry import roles_of
    from megasched.plan.make import make_plan

    namespace: dict = {"__name__": "schedule"}
    exec(compile(code, "schedule.py", "exec"), namespace)
    definition = build_definition(tiny.config("qwen3", num_hidden_layers=5, tie_word_embeddings=False))
    sch = create_schedule(definition, ParallelDims(tensor_model_parallel_size=2), roles_of(definition))
    apply_schedule(sch, namespace["schedule"])
    replaced = replace_modules(sch, definition)
    adapt_modules(sch, definition)
    make_plan(sch, model=definition, causal_lm=True, trials=Trials, replaced=replaced)
    return len(sch.records)


def test_schedules_plan():
    found = [b for b in blocks(ROOT / "docs" / "schedules.md") if b.language == "python" and not b.name]
    assert len(found) > 8
    calls = [plan_schedule(block.text) for block in found]
    # All but the one that only shows how modules are picked call something.
    assert [found[i].text for i, count in enumerate(calls) if not count] == [found[1].text]


def test_every_primitive_has_a_section():
    import megasched

    assert set(megasched.list_primitives()) <= anchors(ROOT / "docs" / "schedules.md")


def test_every_primitive_of_slapo_is_in_its_table_and_there():
    """Those of Slapo's registry, and what its schedules find and trace by."""
    import megasched
    from megasched.language.registry import has_primitive

    registered = "annotate checkpoint cut_pipeline_stage decompose fork_rng fuse replace replace_all shard sync"
    slapos = [*registered.split(), "trace", "trace_until", "find", "find_node", "find_subgraph"]
    page = (ROOT / "docs" / "slapo.md").read_text()
    section = page.partition("## Primitive by primitive")[2].partition("\n\n`")[0]
    firsts = " ".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`(\w+)", firsts)) == set(slapos)
    assert all(map(has_primitive, slapos))
    said = re.search(r"^(`.*`) are not Slapo's", page, re.MULTILINE)
    own = set(re.findall(r"`(\w+)`", said[1]))
    assert own | set(slapos) == {*megasched.list_primitives(), "find_subgraph"}


def models(folder: Path) -> None:
    """The model folders that the pages speak of; configs alone, but for the smallest."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    mixtral = AutoConfig.for_model(
        "mixtral",
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
    )
    AutoModelForCausalLM.from_config(mixtral, dtype=torch.bfloat16).save_pretrained(folder / "Mixtral-small")

    AutoConfig.for_model("falcon").save_pretrained(folder / "falcon")
    AutoConfig.for_model("gpt_neo").save_pretrained(folder / "gpt-neo-1.3B")
    AutoConfig.for_model("flex_olmo").save_pretrained(folder / "flex-olmo")
    AutoConfig.for_model(
        "qwen3",
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
    ).save_pretrained(folder / "Qwen3-8B")
    write_tokenizer(folder / "Qwen3-8B")


def run_command(words: list[str], capsys) -> str:
    """What a command prints, errors included; spaces at the ends of lines dropped."""
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main.main(words)
    captured = capsys.readouterr()
    return "\n".join(line.rstrip() for line in (captured.out + captured.err).splitlines())


# Trainings are run by the slow test of the notebook; those on a small copy of a model take half a minute each.
TRAINING = ("megasched launch local",)
LONG = (*TRAINING, "megasched verify", "megasched new-adapter")


def console_pages() -> list[Path]:
    return [page for page in PAGES if any(block.language == "console" for block in blocks(page))]


@pytest.mark.parametrize("left", [LONG, pytest.param(TRAINING, marks=pytest.mark.slow)], ids=["short", "all"])
@pytest.mark.parametrize("page", console_pages(), ids=lambda page: page.name)
def test_commands_print_what_the_page_shows(page, left, monkeypatch, tmp_path, capsys, ranks_of_commands):
    # The pages show a shell in which the environment is active.
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    models(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    for block in blocks(page):
        if block.name:
            (tmp_path / block.name).parent.mkdir(exist_ok=True)
            (tmp_path / block.name).write_text(block.text)
        if block.language == "console" and ("--no-check" in block.command or not block.command.startswith(left)):
            program, *words = shlex.split(block.command.replace("\\\n", " "))
            assert program == "megasched"
            printed = run_command(words, capsys)
            assert shows(block.shown, printed), f"{block.command} prints\n{printed}"
            assert "Traceback" not in printed


def test_an_excerpt_must_be_what_is_printed():
    assert shows("a\n...\nd e...\n", "a\nb\nc\nd e f")
    assert not shows("a\n...\nd\n", "a\nb\nc")
    assert not shows("a\n", "a\nb")
