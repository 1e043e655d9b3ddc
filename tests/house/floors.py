"""The floors of the house: which files are on which, and which floor may import which.

A floor is a phase of the way of the data, from what users write (``language``) up to the commands (``cli``).
What a floor may import is data: a new arrow is a change of this table, and a reviewer sees it.
"""

from __future__ import annotations

FOLDERS = ("megasched", "model_adapters", "patches", "launch")

# Floor -> the floors that its files may import, beside their own.
ALLOWED = {
    "ground": "",
    "language": "ground",
    "patches": "ground",
    "data": "ground",
    "definition": "ground language",
    "analysis": "ground language definition",
    "model_adapters": "ground language definition",
    "plan": "ground language definition analysis",
    "graph": "ground language definition analysis",
    "weights": "ground language definition plan",
    "layers": "ground language definition analysis plan graph weights",
    "lowering": "ground language definition analysis plan graph weights layers model_adapters",
    "dialects": (
        "ground language patches definition analysis model_adapters plan weights layers lowering trace trainer"
    ),
    "trace": "ground patches",
    "trainer": "ground language patches definition analysis model_adapters plan weights layers lowering trace",
    "planner": "ground language patches definition analysis plan layers lowering trainer trace",
    "launch": "ground language patches definition plan trainer planner",
    "verify": (
        "ground language patches definition analysis model_adapters plan weights layers lowering trainer launch"
    ),
    "tuner": "ground launch",
    "cli": (
        "ground language patches definition analysis model_adapters plan graph weights layers lowering trace "
        "trainer planner launch verify tuner dialects data"
    ),
}

# The floors on which nothing imports Megatron.
WITHOUT_MEGATRON = frozenset(
    ["ground", "language", "definition", "analysis", "plan", "graph", "weights", "model_adapters", "tuner", "cli"]
)
# The floors whose words are checked: one class name for one class, and no forbidden word.
HEART = frozenset(ALLOWED) - {
    "patches",
    "model_adapters",
    "weights",
    "trace",
    "planner",
    "launch",
    "verify",
    "tuner",
    "cli",
}
# Words that say nothing about what they name.
FORBIDDEN = frozenset(
    (
        *("part", "side", "place", "kind", "found", "known", "own", "here"),
        *("joint", "carry", "settle", "told", "noted", "slot", "alike", "guilt"),
    )
)
# First words that no sentence with a verb begins with, such as the first line of every docstring is.
NO_SENTENCE = frozenset(
    (
        *("A", "An", "The", "Of", "What", "Whether", "How", "Where", "Which", "Who", "Why", "When", "Whose", "As"),
        *("In", "On", "At", "For", "From", "With", "Without", "By", "To", "Under", "After", "Before", "If", "And"),
        *("One", "All", "Each", "Every", "Some", "No", "None", "Nothing", "Everything", "Those", "These", "This"),
        *(
            "Its",
            "Their",
            "Both",
            "Same",
            "Other",
            "More",
            "Such",
            "Name",
            "Path",
            "Paths",
            "Size",
            "Sizes",
            "Bytes",
        ),
        *("Number", "Modules", "Parameters", "Arguments", "Args:", "Returns:", "Raises:", "Decorator:"),
    )
)
# Folders whose files all have one form and are never read together.
SHELVES = frozenset(["model_adapters/families", "patches"])
MOST = {"lines of a file": 400, "lines of a function": 60, "files of a folder": 14}

# "path: target" of an import inside of a function -> why it can't stand at the top of its file. Only two reasons
# count: what is imported is heavy and most who import the file never need it, or it is data that names it.
_COMMAND = "heavy: torch, Megatron or Optuna, for this command alone; `megasched --help` starts without"
_IN_A_RANK = (
    "heavy: Megatron, which only a rank imports, once its CUDA is emulated; the process beside has the name"
)
_SEAM = "heavy: torch and Megatron; who lists what a run changes in others' modules imports neither"
_LISTED = "heavy: torch; who lists primitives, with their arguments, makes no graph"
_LIGHT = "heavy: torch; who lists what a run changes in others' modules imports this file and tries nothing"
_FORKED = "heavy: torch; the process that forks the ranks imports it once, when it is asked to"
LATE: dict[str, str] = {
    "launch/jobs/check_process.py: launch/jobs/run_facts.py": _IN_A_RANK,
    "megasched/cli/main.py: launch/quickstart/command.py": _COMMAND,
    "megasched/verify/ranks/worker.py: patches/__init__.py": _FORKED,
    "megasched/verify/ranks/worker.py: patches/host_cuda.py": _FORKED,
    "megasched/verify/trainer_run.py: launch/pretrain_gpt.py": _IN_A_RANK,
    "megasched/verify/trainer_run.py: launch/pretraining.py": _IN_A_RANK,
    "patches/host_cuda.py: patches/host_cuda_emulation.py": "heavy: torch; who lists patches imports it not",
    "megasched/definition/expert_trials.py: megasched/definition/undisturbed.py": _LIGHT,
    "megasched/definition/instances.py: megasched/definition/undisturbed.py": _LIGHT,
    "megasched/graph/primitives.py: megasched/graph/compilers.py": _LISTED,
    "megasched/graph/primitives.py: megasched/graph/definition_graphs.py": _LISTED,
    "megasched/graph/primitives.py: megasched/graph/edits.py": _LISTED,
    "megasched/graph/primitives.py: megasched/graph/naming.py": _LISTED,
    "megasched/graph/primitives.py: megasched/graph/patterns.py": _LISTED,
    "megasched/cli/check/commands.py: megasched/cli/check/archs.py": _COMMAND,
    "megasched/cli/check/commands.py: megasched/cli/check/new_adapter.py": _COMMAND,
    "megasched/cli/check/commands.py: megasched/verify/report/verification.py": _COMMAND,
    "megasched/cli/check/commands.py: megasched/verify/matrix.py": _COMMAND,
    "megasched/cli/check/commands.py: megasched/verify/new_adapter/new_adapter.py": _COMMAND,
    "megasched/cli/check/commands.py: megasched/verify/verify.py": _COMMAND,
    "megasched/cli/main.py: megasched/cli/doctor.py": "heavy: all that a run is made of, for this command alone",
    "megasched/cli/main.py: megasched/trainer/entry.py": "heavy: what a script runs under, which no command needs",
    "megasched/cli/search/commands.py: megasched/cli/search/calibrate.py": _COMMAND,
    "megasched/cli/search/commands.py: megasched/cli/search/plan.py": _COMMAND,
    "megasched/cli/search/commands.py: megasched/cli/search/tune.py": _COMMAND,
    "megasched/cli/show/commands.py: megasched/cli/show/explain.py": _COMMAND,
    "megasched/cli/show/commands.py: megasched/cli/show/report_view.py": _COMMAND,
    "megasched/cli/weights.py: megasched/weights/exporting.py": _COMMAND,
    "megasched/cli/weights.py: megasched/weights/importing.py": _COMMAND,
    "megasched/cli/weights.py: megasched/weights/inspection.py": _COMMAND,
    "megasched/verify/__init__.py: megasched/verify/library/verify_module.py": (
        "heavy: the whole library, for who calls the package; who imports one of its files does without"
    ),
    "megasched/verify/facts.py: megasched/plan/decisions.py": _IN_A_RANK,
    "megasched/verify/facts.py: megasched/trainer/session.py": _IN_A_RANK,
    "megasched/planner/measure/build_stage.py: megasched/trainer/scheduled_model.py": (
        "heavy: Megatron's layers, for who builds a stage; who only names a setting does without"
    ),
    "megasched/layers/megatron/trials.py: megasched/layers/megatron/trial.py": (
        "heavy: Megatron's layers, for who asks for level block alone"
    ),
    "megasched/trainer/seams/arguments.py: megasched/trainer/session_from_args.py": _SEAM,
    "megasched/trainer/seams/model_builder.py: megasched/trainer/builder.py": _SEAM,
    "megasched/trainer/seams/data_check.py: megasched/trainer/token_ids.py": _SEAM,
    "megasched/trainer/seams/load_check.py: megasched/trainer/checkpoint/load_check.py": _SEAM,
    "megasched/trainer/seams/one_writer.py: megasched/trainer/checkpoint/gradient_buffers.py": _SEAM,
    "megasched/trainer/seams/one_writer.py: megasched/trainer/checkpoint/one_writer.py": _SEAM,
    "megasched/trainer/seams/one_writer.py: megasched/trainer/checkpoint/source.py": _SEAM,
    "megasched/trainer/seams/one_writer.py: megasched/trainer/scheduled_model.py": _SEAM,
}

# Prefix of a path -> floor; the longest counts. Folders are called as their floors are.
FLOOR_OF = {
    "megasched/": "ground",
    "megasched/__init__.py": "cli",
    "megasched/__main__.py": "cli",
    **{f"megasched/{floor}/": floor for floor in ALLOWED if floor not in ("ground", *FOLDERS)},
    **{f"{folder}/": folder for folder in FOLDERS[1:]},
}


def floor_of(path: str) -> str:
    """Where a file belongs.

    Args:
        path: of the file, from the top of the repository.

    Raises:
        KeyError: nobody has said so.
    """
    prefixes = [prefix for prefix in FLOOR_OF if path.startswith(prefix)]
    if not prefixes:
        raise KeyError(f"{path} is on no floor: say in tests/house/floors.py on which")
    return FLOOR_OF[max(prefixes, key=len)]
