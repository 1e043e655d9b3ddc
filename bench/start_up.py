"""What commands need before they begin: CPU seconds of imports, and of whole commands on a small model.

Contenders take turns, so that a machine that is busy for a while is so for all of them.

    python bench/start_up.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from statistics import median

import machine
from shapes import model_folder

ROUNDS = 7
UNCOMPILED = "from megasched.imports import command_imports\nwith command_imports(): "
IMPORTS = {
    "import torch": "import torch",
    "import transformers": "import transformers.models",
    "import megatron.training.training": "import megatron.training.training",
    "the same as commands of megasched do": f"{UNCOMPILED}import megatron.training.training",
}
COMMANDS = {
    "megasched --help": ["--help"],
    "megasched archs": ["archs"],
    "megasched doctor": ["doctor"],
    "megasched show, TP 2": ["show", "--tp", "2", "--hf-model"],
}


def main() -> None:
    python = [sys.executable, "-W", "ignore"]
    commands = {name: [*python, "-c", code] for name, code in IMPORTS.items()}
    commands |= {name: [*python, "-m", "megasched", *words] for name, words in COMMANDS.items()}
    commands["megasched show, TP 2"].append(model_folder("tiny"))
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(ROUNDS):
        for name, command in commands.items():
            seconds[name].append(_cpu_seconds(command))
    rows = {name: {"median": median(taken), "rounds": taken} for name, taken in seconds.items()}
    print(machine.write("start_up", {"start_up": rows}))


def _cpu_seconds(command: list[str]) -> float:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("TORCHDYNAMO_DISABLE", "PYTHONDONTWRITEBYTECODE"):
        environment.pop(name, None)
    before = machine.cpu_seconds_of_children()
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return machine.cpu_seconds_of_children() - before


if __name__ == "__main__":
    main()
