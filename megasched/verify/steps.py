"""The steps that are compared, in rank processes: the trainer's under a schedule, and the unscheduled model's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasched.config_check import CONFIG
from megasched.definition import load_config
from megasched.layout import Layout
from megasched.reading.files import read_bytes
from megasched.verify.dropouts import switch_on
from megasched.verify.subject import Subject

if TYPE_CHECKING:
    from megasched.records import Record
    from megasched.verify.rank_pool import RankPool
    from megasched.verify.reference import HfStep
    from megasched.verify.trainer_run import RankReport

LEARNING_RATE, EPSILON = 1e-3, 1e-5  # as trainer_run.RUN_FLAGS has them
SEED = 1234


@dataclass
class Steps:
    """Runs steps, each with every module watched.

    Attributes:
        pool: processes to run them on.
        timeout: seconds for each.
        progress: told what is being done.
    """

    pool: RankPool
    subject: Subject
    layout: Layout
    bf16: bool
    timeout: float
    progress: Callable[[str], None]
    _adapters: tuple[Record, ...] = ()

    def scheduled(self, schedule: str) -> list[RankReport]:
        """One step of Megatron's trainer; the references that are asked for after it have its adapters.

        Raises:
            RankError: it was refused, or failed.
        """
        from megasched.verify import trainer_run

        flags = [*self.layout.flags(), "--vocab-size", str(self.subject.vocabulary)]
        flags += ["--trust-remote-code"] if self.subject.trust_remote_code else []
        flags += ["--bf16"] if self.bf16 else []
        reports: list[RankReport] = self.pool.run(
            self.layout.world_size,
            trainer_run.train,
            self.subject.folder,
            flags,
            iterations=1,
            schedule=schedule,
            random_init=self.subject.random_init,
            tokens=self.subject.tokens,
            watch=True,
            timeout=self.timeout,
        )
        self._adapters = next(report.facts.adapters for report in reports if report.facts is not None)
        return reports

    def can_drop_out(self) -> bool:
        """Whether ``with_dropout`` can be run: on a small copy of an architecture that has dropouts."""
        return self.subject.small and switch_on(self._config())

    def with_dropout(self, schedule: str) -> list[RankReport]:
        """``scheduled`` with every dropout of the config on."""
        config, file = self._config(), Path(self.subject.folder) / "config.json"
        before = read_bytes(file, CONFIG)
        switch_on(config)
        config.save_pretrained(file.parent)
        try:
            return self.scheduled(schedule)
        finally:
            file.write_bytes(before)

    def _config(self) -> Any:
        return load_config(self.subject.folder, trust_remote_code=self.subject.trust_remote_code)

    def reference(self, batches: Any, in_float64: bool = False) -> HfStep:
        """The same batches through the unscheduled model, in float32 or float64."""
        from megasched.verify.reference import hf_step

        return self._alone(hf_step, self.subject.folder, batches, in_float64=in_float64, watch=True)

    def rounded(self, batches: Any) -> tuple[HfStep, HfStep]:
        """The same with weights rounded to bf16: in bf16, and in float64."""
        import torch

        from megasched.verify.bfloat16 import rounded_step

        folder = self.subject.folder
        plain, exact = (
            self._alone(rounded_step, folder, batches, dtype, watch=True)
            for dtype in (torch.bfloat16, torch.float64)
        )
        return plain, exact

    def optimizer_errors(self, gradients: dict[str, Any], weights: dict[str, Any]) -> dict[str, float]:
        """How far weights after a step are from what torch's AdamW makes of the same gradients."""
        found: dict[str, float] = self._alone(step_errors, self.subject.folder, gradients, weights)
        return found

    def _alone(self, function: Callable[..., Any], *given: Any, **options: Any) -> Any:
        options |= {
            "random_init": self.subject.random_init,
            "trust_remote_code": self.subject.trust_remote_code,
            "adapters": self._adapters,
        }
        return self.pool.run(1, function, *given, timeout=self.timeout, **options)[0]


def step_errors(
    folder: str,
    gradients: dict[str, Any],
    weights: dict[str, Any],
    *,
    random_init: bool,
    trust_remote_code: bool,
    adapters: Sequence[Record] = (),
) -> dict[str, float]:
    """In a rank: how far weights after a step are from torch's AdamW, relative to the largest change of each."""
    from megasched.verify.reference import adamw_step, hf_model

    options = {"random_init": random_init, "trust_remote_code": trust_remote_code}
    model = hf_model(folder, SEED, adapters=adapters, **options)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    adamw_step(model, gradients, lr=LEARNING_RATE, eps=EPSILON)
    found = {}
    for name, parameter in model.named_parameters():
        change = max(float((parameter.detach() - before[name]).abs().max()), LEARNING_RATE * 1e-2)
        found[name] = float((weights[name] - parameter.detach()).abs().max()) / change
    return found
