"""Chooses which of the ranks' lines a terminal shows; the log of the run has all of them.

Of a run of 20 steps Megatron prints some 1,000 lines: its arguments, what it builds, what other packages miss.
Hidden is what is known to be of that kind, so that lines of the user's own code, and unknown ones, are shown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from megasched.trainer.run_failure import ERROR, FAILED

# Megatron's arguments: `_print_args` in megatron/training/arguments.py.
ARGUMENTS = re.compile(r"^-{3,} (?:[\w ]+ )?arguments -{3,}$")
END_OF_ARGUMENTS = re.compile(r"^-{3,} end of (?:[\w ]+ )?arguments -{3,}$")
# With what is printed below them: megatron/training/{initialize,training,checkpointing}.py,
# megatron/training/theoretical_memory_usage.py, megatron/core/timers.py, and loggers at the level INFO.
OF_MEGATRON = re.compile(
    r"^\s*(?:"
    r">|INFO:|using (?:world size|torch\.)|setting number of |Number of |Total number of |Params for bucket "
    r"|Theoretical memory |Activation memory |Memory penalty |compute_activation_memory"
    r"|\[(?:before|after) [^\]]*\] datetime: |\[Rank \d+\] \(|time to initialize |time \(ms\)"
    r"|Evaluating (?:on|iter) |done with setup |training \.\.\.|Overwriting rerun_state_machine"
    r"|Storing distributed optimizer"
    r"|WARNING:megatron\.core\.rerun_state_machine:(?:RerunStateMachine initialized|Setting RerunStateMachine)"
    r"|WARNING:megatron\.core\.dist_checkpointing\.strategies\.torch:MCore's async save"
    r"|PP rank \d|VPP rank \d"
    r"|(?:train|validation|test):\s+\d+$"
    r"|[\w/-]+ \.{3,}: \("
    r"|\S+ \(param\.main_grad\.dtype="
    r")"
)
# Python's warnings by installed packages, and the code that is below them; torch's of a GPU that is not there.
OF_PACKAGES = re.compile(r"^\S*/(?:site|dist)-packages/\S+:\d+: \w*Warning: ")
CODE_OF_WARNING = re.compile(r"^  [A-Za-z_]")
OF_TORCH = re.compile(r"^W\d{4} .*torch/utils/cpp_extension\.py:")
RULE = re.compile(r"^-*$")
# From then on all is shown.
FAILURE = re.compile(
    rf"Traceback \(most recent call last\)|^{ERROR}|^{FAILED}|^[EF]\d{{4}} |^\w*Error\b|: error: "
)


@dataclass
class ConsoleLines:
    """Reads the lines of a run in their order.

    Attributes:
        in_arguments: between the first and the last line of Megatron's arguments.
        after_warning: the line before was a warning of a package.
        failed: an error was read.
    """

    in_arguments: bool = False
    after_warning: bool = False
    failed: bool = False
    _seen: set[str] = field(default_factory=set)

    def shows(self, line: str) -> bool:
        """Returns whether a terminal is to show ``line``, which has no line end."""
        self.failed = self.failed or FAILURE.search(line) is not None
        return self.failed or not (self._of_arguments(line) or self._of_packages(line) or self._said(line))

    def _of_arguments(self, line: str) -> bool:
        if ARGUMENTS.match(line):
            self.in_arguments = True
        if END_OF_ARGUMENTS.match(line):
            self.in_arguments = False
            return True
        return self.in_arguments

    def _of_packages(self, line: str) -> bool:
        code = self.after_warning and CODE_OF_WARNING.match(line) is not None
        self.after_warning = OF_PACKAGES.match(line) is not None
        return code or self.after_warning

    def _said(self, line: str) -> bool:
        """Returns whether Megatron says it while it starts, or another rank has warned of it."""
        if any(of.match(line) for of in (OF_MEGATRON, OF_TORCH, RULE)):
            return True
        if not line.startswith("WARNING:"):
            return False
        again = line in self._seen
        self._seen.add(line)
        return again
