"""Every reader with a file that it takes, in a folder of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests import tiny

LOG = """  seq_length ...................................... 1024
 [2026-11-22 15:10:01.000000] iteration        1/      60 | consumed samples: 4 |\
 elapsed time per iteration (ms): 500.0 |\
 learning rate: 1.0E-04 | global batch size:     4 | lm loss: 4.1E+00 | loss scale: 1.0 | grad norm: 1.2 |\
 number of skipped iterations:   0 | number of nan iterations:   0 |
 [2026-11-22 15:10:02.000000] iteration        2/      60 | consumed samples: 8 |\
 elapsed time per iteration (ms): 400.0 |\
 learning rate: 1.0E-04 | global batch size:     4 | lm loss: 4.0E+00 | loss scale: 1.0 | grad norm: 1.2 |\
 number of skipped iterations:   0 | number of nan iterations:   0 |
 validation loss at iteration 2 | lm loss value: 3.9E+00 | lm loss PPL: 4.9E+01 |
 [2026-11-22 15:10:03.000000] successfully saved checkpoint from iteration 2 to /x [ t 1/1, p 1/1 ]
 [2026-11-22 15:10:03.000000] | MnRtt/Rnk: 8.8ms/0 | MxRtt/Rnk: 1511.25ms/3 |
[exiting program at iteration 2] datetime: 2026-11-22 15:10:04
"""  # fmt: skip


@dataclass(frozen=True)
class Reader:
    """One reader.

    Attributes:
        file: that is damaged, by its name in the folder.
        make: fills a folder.
        read: what reads it, given the folder.
    """

    file: str
    make: Callable[[Path], Any]
    read: Callable[[Path], Any]


def written(name: str, content: bytes | str | Any) -> Callable[[Path], None]:
    """Makes a folder with one file; what is no text is JSON."""
    text = content if isinstance(content, bytes | str) else json.dumps(content)

    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    return make


def _records(folder: Path) -> None:
    from megasched.language.records import load_records

    load_records(folder / "records.json")


def _certificate(folder: Path) -> None:
    from megasched.trainer.evidence.certificate import require_certificate

    subject = {"versions": {"torch": "2"}, "schedule": {}, "model": {}, "parallelism": {"TP": True, "SP": False}}
    require_certificate(folder / "certificate.json", subject)


def _trace(folder: Path) -> None:
    from megasched.trace.chrome_trace import read_trace

    read_trace(folder / "trace.json")


def _part(folder: Path) -> None:
    from megasched.trace.gather import RankSpans

    RankSpans.read(folder / "part.json")


def _hardware(folder: Path) -> None:
    from megasched.planner.hardware.hardware import load_hardware

    load_hardware(str(folder / "gpu.toml"))


def _warm_start(folder: Path) -> None:
    from megasched.tuner.space import Space
    from megasched.tuner.warm_start import read_warm_start

    space = Space()
    space.choice("tp", [1, 2, 4])
    read_warm_start(folder / "plan.json", space)


def _options(folder: Path) -> None:
    from megasched.language.schedule_file import _value

    _value("ratio", (folder / "option").read_bytes().decode(errors="surrogateescape"))


def _override(folder: Path) -> None:
    from megasched.definition.build import load_config

    written("config.json", _llama())(folder)
    load_config(folder, [(folder / "override").read_bytes().decode(errors="surrogateescape")])


def _config(folder: Path) -> None:
    from megasched.definition.build import load_config

    load_config(folder)


def _definition(folder: Path) -> None:
    from megasched.definition.build import build_definition, load_config

    build_definition(load_config(folder))


def _index(folder: Path) -> None:
    from megasched.weights.hf.safetensors_files import list_tensors

    list_tensors(folder)


def _safetensors(folder: Path) -> None:
    from megasched.weights.hf.safetensors_files import list_tensors
    from megasched.weights.lazy import Stored

    for key, path in list_tensors(folder).items():
        tensor = Stored(path, key)
        tensor.read(tuple((0, size) for size in tensor.shape))


def _tracker(folder: Path) -> None:
    from megasched.weights.torch_dist.reader import checkpoint_folder

    checkpoint_folder(folder)


def _checkpoint(folder: Path) -> None:
    from megasched.weights.inspection import inspect_checkpoint

    inspect_checkpoint(folder)


def _values(folder: Path) -> None:
    from megasched.weights.torch_dist.reader import TorchDist, checkpoint_folder

    checkpoint = TorchDist(checkpoint_folder(folder))
    checkpoint.check_files()
    checkpoint.unreadable()
    _ = checkpoint.common


def _status(folder: Path) -> None:
    import io

    from rich.console import Console

    from megasched.cli.status import print_status, summary
    from megasched.launch.status.run_status import RunReader

    found = RunReader(str(folder)).look()
    from datetime import datetime

    print_status(found, Console(file=io.StringIO()))
    summary(found, datetime.now())
    json.dumps(found.to_dict())


def _owner(folder: Path) -> None:
    from megasched.trainer.checkpoint.save_claim import SaveClaim

    SaveClaim(folder).release()


def _idx(folder: Path) -> None:
    from megasched.reading.idx_file import read_idx

    read_idx(folder / "tokens.idx", (folder / "tokens.bin").stat().st_size)


def _space(folder: Path) -> None:
    from megasched.tuner.space import load_space

    load_space(folder / "space.py")


def _adapter(folder: Path) -> None:
    from megasched.weights.exporting import _lora_config
    from megasched.weights.lora import read_adapter_config

    config = _lora_config(folder)
    if config:
        read_adapter_config(config)


def _llama() -> dict[str, Any]:
    return tiny.config("llama").to_diff_dict()


def _idx_files(folder: Path) -> None:
    import numpy

    lengths = numpy.array([5, 3, 4], "<i4")
    pointers = numpy.array([0, 10, 16], "<i8")
    documents = numpy.array([0, 1, 3], "<i8")
    head = b"MMIDIDX\0\0" + numpy.array([1], "<i8").tobytes() + b"\x08"
    head += numpy.array([len(lengths), len(documents)], "<i8").tobytes()
    (folder / "tokens.idx").write_bytes(head + lengths.tobytes() + pointers.tobytes() + documents.tobytes())
    (folder / "tokens.bin").write_bytes(numpy.arange(12, dtype="<u2").tobytes())


@cache
def _checkpoint_files() -> dict[str, bytes]:
    """A small checkpoint: three tensors, and what all ranks share."""
    import tempfile
    from argparse import Namespace

    import torch
    from safetensors.torch import save_file

    from megasched.weights.lazy import Stored
    from megasched.weights.torch_dist.writer import TorchDistWriter

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "release"
        folder.mkdir()
        writer = TorchDistWriter(folder, lambda count: None)
        save_file({f"{name}.weight": torch.arange(12.0).reshape(3, 4) for name in "abc"}, Path(name) / "from")
        for key in ("a.weight", "b.weight", "c.weight"):
            writer.add(key, Stored(Path(name) / "from", key), torch.float32)
        args = Namespace(tensor_model_parallel_size=2, pipeline_model_parallel_size=1)
        writer.finish({"checkpoint_version": 3.0, "iteration": 0, "args": args})
        (Path(name) / "latest_checkpointed_iteration.txt").write_text("release")
        return {str(p.relative_to(name)): p.read_bytes() for p in Path(name).rglob("*") if p.is_file()}


def _make_checkpoint(folder: Path) -> None:
    for name, content in _checkpoint_files().items():
        written(name, content)(folder)


def _make_safetensors(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"a": torch.arange(6.0), "b": torch.ones(2, 3)}, folder / "model.safetensors")


_RECORD = {"primitive": "shard", "path": "model", "arguments": {"param": "weight", "axis": 0}, "source": "x.py:1"}
_RECORDS = [_RECORD, {**_RECORD, "arguments": {"x": {"$tuple": [1, 2]}, "f": {"$function": "json:dumps"}}}]
_CERTIFICATE = {"format": 1, "versions": {"torch": "2"}, "schedule": {}, "model": {}, "parallelism": {"TP": True}}
_SPAN = {"iteration": 2, "microbatch": 0, "chunk": 0}
_PLACE = {"pp": 0, "tp": 0, "dp": 0, "cp": 0}
_EVENT = {"ph": "X", "name": "f", "cat": "forward", "pid": 0, "tid": 0, "ts": 1.0, "dur": 2.0, "args": _SPAN}
_OTHER = {"format": 1, "ranks": {"0": _PLACE}, "clock_error": 0.0}
_OWNER = {"job": "", "restart": 0, "host": "elsewhere", "pid": 1, "since": 1.0}
_LORA = {
    **{"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "use_rslora": False, "fan_in_fan_out": False},
    **{"target_modules": ["model.q"], "rank_pattern": {"model.q": 2}, "alpha_pattern": {}},
}
_PART = {
    **{"rank": 0, "place": _PLACE, "host": "h", "barriers": [1.0, 2.0]},
    "iterations": {
        "2": [{"rank": 0, "kind": "forward", "microbatch": 0, "chunk": 0, "start": 0.0, "end": 1.0, "name": "f"}]
    },
}


def _gpu(folder: Path) -> None:
    from importlib.resources import files

    written("gpu.toml", (files("megasched.planner.hardware") / "gpus" / "h100-80gb.toml").read_bytes())(folder)


def _configs(family: str) -> Callable[[Path], None]:
    return lambda folder: written("config.json", tiny.config(family).to_diff_dict())(folder)


RELEASE = "release"
READERS: dict[str, Reader] = {
    "records": Reader("records.json", written("records.json", _RECORDS), _records),
    "certificate": Reader(
        "certificate.json",
        written("certificate.json", {**_CERTIFICATE, "found": {"verdict": "equal"}}),
        _certificate,
    ),
    "trace": Reader(
        "trace.json", written("trace.json", {"traceEvents": [_EVENT] * 3, "otherData": _OTHER}), _trace
    ),
    "part": Reader("part.json", written("part.json", _PART), _part),
    "hardware": Reader("gpu.toml", _gpu, _hardware),
    "warm start": Reader(
        "plan.json", written("plan.json", {"layouts": [{"flags": {"tensor_model_parallel_size": 2}}]}), _warm_start
    ),
    "option": Reader("option", written("option", '{"a": [1, 2.5, "x"]}'), _options),
    "override": Reader("override", written("override", "num_hidden_layers=2"), _override),
    "llama": Reader("config.json", _configs("llama"), _config),
    "gemma2": Reader("config.json", _configs("gemma2"), _definition),
    "gpt2": Reader("config.json", _configs("gpt2"), _definition),
    "index": Reader(
        "model.safetensors.index.json",
        written("model.safetensors.index.json", {"metadata": {}, "weight_map": {"a": "model-1.safetensors"}}),
        _index,
    ),
    "safetensors": Reader("model.safetensors", _make_safetensors, _safetensors),
    "tracker": Reader("latest_checkpointed_iteration.txt", _make_checkpoint, _tracker),
    "format": Reader(f"{RELEASE}/metadata.json", _make_checkpoint, _checkpoint),
    "metadata": Reader(f"{RELEASE}/.metadata", _make_checkpoint, _checkpoint),
    "values": Reader(f"{RELEASE}/__0_0.distcp", _make_checkpoint, _values),
    "log": Reader("train.log", written("train.log", LOG), _status),
    "job": Reader("job.json", written("job.json", {"jobs": ["7"], "job": {}, "facts": {}}), _status),
    "owner": Reader(".megasched/claim-x/owner.json", written(".megasched/claim-x/owner.json", _OWNER), _owner),
    "idx": Reader("tokens.idx", _idx_files, _idx),
    "space": Reader(
        "space.py", written("space.py", "def space(space):\n    space.choice('tp', [1, 2])\n"), _space
    ),
    "adapter": Reader("hf_model/adapter_config.json", written("hf_model/adapter_config.json", _LORA), _adapter),
}
