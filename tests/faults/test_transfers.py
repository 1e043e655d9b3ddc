"""An import or export that does not come to its end leaves nothing that is taken for complete."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megasched.cli.main import main
from megasched.errors import CheckpointError, ConfigError
from megasched.files import whole_folder, write_whole
from megasched.launch.quickstart.corpus import write_tokenizer
from megasched.launch.watched_run import run_watched
from megasched.verify.ranks.pool import RankError
from megasched.verify.trainer_run import train
from megasched.weights.exporting import export_weights
from megasched.weights.importing import import_weights
from megasched.weights.inspection import inspect_checkpoint
from tests.faults.checkpoints import exported, imported, weights
from tests.faults.disks import read_only
from tests.faults.runs import ROOT, SAVING, TP2


def killed(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "tests.faults.killed_transfer", *map(str, arguments)]
    run = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert run.returncode == -signal.SIGKILL


def test_an_import_that_is_killed(tmp_path):
    model, save = weights("llama", tmp_path / "model"), tmp_path / "ckpt"
    killed("import", model, save)
    (beside,) = save.iterdir()  # no tracker, and no release
    assert beside.name.startswith(".release-")
    with pytest.raises(CheckpointError, match="ckpt: no complete checkpoint"):
        inspect_checkpoint(save)
    assert inspect_checkpoint(imported(model, save)).problems == []


def test_an_export_that_is_killed(tmp_path):
    model = weights("llama", tmp_path / "model")
    save, output = imported(model, tmp_path / "ckpt"), tmp_path / "hf"
    killed("export", save, output)
    assert not output.exists()
    assert len(list(tmp_path.glob(".hf-*"))) == 1
    assert (exported(save, output, model) / "model.safetensors").is_file()


def filling(disk: Path) -> Callable[[int], Any]:
    """Progress of a transfer that found room, beside something that takes the room meanwhile."""

    def begun(size: int) -> Any:
        with (disk / "other").open("wb") as file:
            status = os.statvfs(disk)
            file.write(bytes((status.f_bavail - 4) * status.f_frsize))
        return nullcontext(lambda count: None)

    return begun


@pytest.mark.parametrize("what", ["import", "export"])
def test_a_disk_that_fills_meanwhile(disk, tmp_path, what):
    model = weights("llama", tmp_path / "model")
    if what == "import":
        transfer = partial(import_weights, model, disk / "ckpt")
    else:
        transfer = partial(export_weights, imported(model, tmp_path / "ckpt"), disk / "hf", max_shard_size=1 << 30)
    with pytest.raises(ConfigError, match=r"can't be written: \[Errno 28\] No space left on device"):
        transfer(progress=filling(disk))
    left = [path.name for path in disk.rglob("*") if path.is_file()]
    assert left == ["other"]


def fill(disk: Path) -> None:
    """Leaves room for two blocks."""
    status = os.statvfs(disk)
    (disk / "other").write_bytes(bytes((status.f_bavail - 2) * status.f_frsize))


def test_a_disk_that_is_full_for_safetensors(disk):
    """Adapters, and what transformers saves, are written by it; its errors are no OSErrors, and name no folder."""
    fill(disk)
    full = pytest.raises(ConfigError, match=r"disk/adapter: can't be written: .*No space left on device")
    with full, whole_folder(disk / "adapter") as folder:
        save_file({"lora_A": torch.zeros(256, 256)}, folder / "adapter_model.safetensors")
    assert [path.name for path in disk.iterdir()] == ["other"]


def test_a_disk_that_is_full_for_text(disk, tmp_path, capsys):
    """An error of a write names no file, and each of these ended in a traceback."""
    fill(disk)
    write_tokenizer(tmp_path)
    (tmp_path / "text.jsonl").write_text('{"text": "' + "abcdefgh" * 10_000 + '"}\n')
    model = ["--tokenizer-model", str(tmp_path)]
    with pytest.raises(SystemExit, match="1"):
        main(["tokenize", str(tmp_path / "text.jsonl"), *model, "--output", str(disk / "text")])
    with pytest.raises(SystemExit, match="1"):
        main(["quickstart", "--dir", str(disk)])
    told = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("megasched: tokenizing")]
    no_room = "No space left on device"
    text, data = told
    assert text == f"megasched: error: {disk}/text: {no_room}"
    assert re.fullmatch(rf"megasched: error: {disk}/data/corpus-\w+: {no_room}", data)
    with pytest.raises(OSError, match=no_room) as raised:
        write_whole(disk / "page.html", ["<p>" * 10_000])
    assert raised.value.filename == str(disk / "page.html")
    many = [sys.executable, "-c", "print('x' * 10_000)"]
    with pytest.raises(OSError, match=no_room) as raised:
        run_watched(many, env=os.environ, log_path=disk / "train.log", on_line=lambda line: None)
    assert raised.value.filename == str(disk / "train.log")


def test_a_disk_that_is_read_only(disk, ranks, tmp_path):
    model = weights("llama", tmp_path / "model")
    save = imported(model, tmp_path / "ckpt")
    with read_only(disk):
        with pytest.raises(ConfigError, match=r"disk/ckpt/release: can't be written: .*Read-only file system"):
            import_weights(model, disk / "ckpt", progress=filling(disk))
        with pytest.raises(ConfigError, match=r"disk/hf: can't be written: .*Read-only file system"):
            export_weights(save, disk / "hf", progress=filling(disk), max_shard_size=1 << 30)
        saving = [*TP2, *SAVING, "--save", str(disk / "run"), "--save-interval", "1"]
        with pytest.raises(RankError) as caught:
            ranks.run(2, train, model, saving, iterations=1)
    assert str(caught.value).count(f"ConfigError: --save {disk}/run: it can't be written to: [Errno 30]") == 2
