"""Runs the steps to compare: the trainer's under a schedule in ranks, plain transformers' in their own process."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megasched.definition.build import build_definition, load_config
from megasched.definition.config_check import CONFIG
from megasched.definition.objectives import CAUSAL_LM, Objective
from megasched.definition.small_models.covering import Lack, covering_copy
from megasched.definition.small_models.small_models import copy_code, write_model
from megasched.errors import ConfigError
from megasched.language.lora import A, B, Lora
from megasched.language.parallel_dims import ParallelDims
from megasched.model_adapters.registry import load_adapter
from megasched.reading.files import read_bytes
from megasched.trainer.session import Session, open_session
from megasched.verify import batches as make
from megasched.verify import recording, trainer_run
from megasched.verify.batches import unreached_windows
from megasched.verify.locate.dropout_masks import switch, switch_on
from megasched.verify.plain.runs import OPTIMIZER, Batches, PlainModel, PlainRun
from megasched.verify.ranks.pool import RankPool
from megasched.verify.recording import RankReport
from megasched.verify.trainer_run import gather
from megasched.weights.hf.hub import local_folder
from megasched.weights.hf.safetensors_files import has_weights

# Epsilon: gradients below it are told from rounding; decay: enough to see that it is where it must be.
STEP_FLAGS = ["--adam-eps", str(OPTIMIZER["eps"]), "--weight-decay", str(OPTIMIZER["weight_decay"])]
Look = tuple[int, int]  # step, and micro-batch of all DP ranks'
FIRST: Look = (0, 0)


@dataclass
class Steps:
    """Runs steps, with every module watched in one micro-batch.

    Attributes:
        pool: processes to run them on.
        timeout: seconds for each.
        progress: called with what is being done.
        seed: of the data.
    """

    pool: RankPool
    subject: Subject
    layout: ParallelDims
    bf16: bool
    timeout: float
    progress: Callable[[str], None]
    seed: int = 0
    batches: Batches = field(init=False)
    _plain: PlainModel = field(init=False)
    _known: dict[Any, PlainRun] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        subject, steps = self.subject, 1 if self.bf16 else make.STEPS
        self.batches = make.make_batches(self._config(), self.layout, steps, subject.objective, self.seed)
        self._plain = PlainModel(
            subject.folder,
            subject.weights,
            subject.objective.auto_class,
            subject.objective.predicts_next,
            subject.trust_remote_code,
            silent=True,
        )

    def scheduled(self, schedule: str, look: Look = FIRST, *, silent: bool = True) -> list[RankReport]:
        """Runs steps of Megatron's trainer, up to the one that is looked at if that is not the first.

        References that are asked for afterwards have the adapters of this run.

        Args:
            silent: switch dropouts off, whatever the code says.

        Raises:
            RankError: it was refused, or failed.
        """
        sizes = make.flags(self.layout, self._config(), self.subject.objective)
        flags = [*self.layout.flags(), *sizes, *STEP_FLAGS]
        flags += ["--trust-remote-code"] if self.subject.trust_remote_code else []
        flags += ["--adapter", self.subject.adapter] if self.subject.adapter is not None else []
        flags += ["--bf16"] if self.bf16 else []
        flags += trainer_run.VALIDATION_FLAGS if silent and not self.bf16 else []
        batches = self._up_to(look)
        file = Path(self.subject.batches)
        batches.save(file)
        reports: list[RankReport] = self.pool.run(
            self.layout.world_size,
            trainer_run.train,
            self.subject.folder,
            flags,
            iterations=batches.steps,
            schedule=schedule,
            random_init=False,
            script=self.subject.objective.script,
            look=recording.Look(str(file), *look, silent=silent),
            timeout=self.timeout,
        )
        self._adapt(reports)
        return reports

    def plan(self, schedule: str) -> None:
        """Plans a schedule in this process as each rank will, so that what can't be planned starts none.

        Raises:
            ConfigError, ScheduleError: what a run would refuse about model, schedule and layout.
        """
        subject, config = self.subject, self._config()
        session = subject.open_session(schedule, self.layout, subject.folder)
        length = make.sequence_length(self.layout, config, subject.objective)
        session.freeze_unreached(make.MICRO_BATCH, length)
        session.stage_layers(length)
        session.plan  # noqa: B018  # made for its problems

    def can_drop_out(self) -> bool:
        """Returns whether ``with_dropout`` can be run: the architecture has dropouts that its config names."""
        return switch_on(self._config())

    def with_dropout(self, schedule: str) -> list[RankReport]:
        """Runs ``scheduled`` with every dropout of the config on."""
        config, file = self._config(), Path(self.subject.folder) / "config.json"
        before = read_bytes(file, CONFIG)
        switch_on(config)
        config.save_pretrained(file.parent)
        try:
            return self.scheduled(schedule, silent=False)
        finally:
            file.write_bytes(before)

    def reference(
        self, look: Look = FIRST, dtype: str = "float32", *, rounded: bool = False, draw: int = 0
    ) -> PlainRun:
        """Runs the batches of ``scheduled`` through plain transformers, or returns an earlier such run.

        Args:
            dtype: dtype of the arithmetic.
            rounded: start from weights rounded to bf16.
            draw: of ``nudge``, which changes each weight by a rounding.

        Raises:
            PlainError: it failed.
        """
        key = look, dtype, rounded, draw, self._plain.adapters, self._plain.unfrozen
        if key not in self._known:
            options: dict[str, Any] = {"look": look, "timeout": self.timeout}
            self._known[key] = self.pool.plain.run(
                self._plain, self._up_to(look), dtype=dtype, rounded=rounded, draw=draw, **options
            )
        return self._known[key]

    def _up_to(self, look: Look) -> Batches:
        return self.batches if look[0] == 0 else self.batches.first(look[0] + 1)

    def _config(self) -> Any:
        return load_config(self.subject.folder, trust_remote_code=self.subject.trust_remote_code)

    def _adapt(self, reports: list[RankReport]) -> None:
        """Gives the plain model the adapters of a run, with the values that they began with."""
        records = next(report.facts.adapters for report in reports if report.facts is not None)
        if not records or self._plain.adapters:
            return
        adapters = tuple(
            (record.path, Lora(**record.arguments).scaling) for record in records if record.primitive == "adapt"
        )
        unfrozen = tuple(record.path for record in records if record.primitive == "unfreeze")
        start = gather(reports, "before", self.layout.tp)
        weights = {name: value.contiguous() for name, value in start.items() if name.split(".")[-2] in (A, B)}
        self._plain = replace(self._plain, adapters=adapters, unfrozen=unfrozen, adapter_weights=weights)


@dataclass(frozen=True)
class Subject:
    """Describes a folder with config and weights that is verified.

    Attributes:
        folder: HF folder, with every dropout of the config off.
        model: name of the architecture.
        layers: number of its layers.
        objective: what it is trained to do.
        weights: file of safetensors by the names of parameters; None where they are a checkpoint of HF's.
        batches: path for the file of batches.
        small: whether it is a copy that was made for this.
        drops_out: whether the model that it is made of has dropouts on.
        adapter: file of the adapter that stands before an installed one.
        notes: what was changed in the model, and what no check sees of it.
        lacks: layers of the model that a small copy has none like.
    """

    folder: str
    model: str
    layers: int
    objective: Objective
    weights: str | None
    batches: str
    trust_remote_code: bool
    small: bool
    drops_out: bool = False
    adapter: str | None = None
    notes: tuple[str, ...] = ()
    lacks: tuple[Lack, ...] = ()

    def open_session(
        self, schedule: str, layout: ParallelDims, hf_model: str, overrides: Sequence[str] = ()
    ) -> Session:
        """Opens the session of a run of this folder, or of the model that it is a copy of, in this process."""
        return open_session(
            schedule,
            hf_model,
            layout,
            overrides=overrides,
            trust_remote_code=self.trust_remote_code,
            objective=self.objective.name,
            adapter=self.adapter,
        )


def make_subject(
    hf_model: str,
    target: Path,
    layout: ParallelDims,
    *,
    full_size: bool,
    layers: int | None,
    overrides: Sequence[str],
    trust_remote_code: bool,
    objective: Objective = CAUSAL_LM,
    adapter: str | None = None,
) -> Subject:
    """Makes the folder that is verified: a small copy of a model, or the model with its dropouts off.

    Args:
        target: where the folder is made.
        layers: number of layers of a small copy; enough for the layout by default.
        objective: what it is trained to do.

    Raises:
        ConfigError: no small copy can be made, transformers has no such model of it, or options that do not go
            together.
    """
    config = load_config(hf_model, overrides, trust_remote_code=trust_remote_code)
    name = type(config).__name__.removesuffix("Config")
    dropouts = switch(config if full_size else copy.deepcopy(config), 0.0)
    lacks: list[Lack] = []
    if full_size:
        if overrides or layers is not None:
            raise ConfigError(
                "--hf-override and --layers change a small copy; --full-size takes the model as it is"
            )
        hf_model = str(local_folder(hf_model))
        depth = getattr(config.get_text_config(decoder=True), "num_hidden_layers", 0)
        notes = [f"dropouts are off on both sides: {', '.join(dropouts)}"] if dropouts else []
    else:
        of_classes: dict[str, Any] = {"objective": objective, "trust_remote_code": trust_remote_code}
        config, depth, lacks = covering_copy(config, layers, stages=layout.pp * layout.vpp, **of_classes)
        notes = [f"no layer of the copy is like {lack}: --layers or --full-size gives it one" for lack in lacks]
    own = full_size and has_weights(hf_model)
    if adapter is not None:
        load_adapter(adapter, config.model_type)  # what is wrong with it is told before any rank starts
    build_definition(config, objective, trust_remote_code=trust_remote_code)  # or says why there is none
    windows = unreached_windows(config, layout, objective)
    notes += [f"no sequence is longer than {field} {value}" for field, value in windows.items()]
    target.mkdir()
    if own:
        _link(hf_model, target)
        config.save_pretrained(target)
    else:
        copy_code(hf_model, target, trust_remote_code)
        write_model(config, target, trust_remote_code=trust_remote_code, objective=objective)
    weights = None if own else str(target / "model.safetensors")
    batches = str(target.with_name("batches.safetensors"))
    found = Subject(str(target), name, depth, objective, weights, batches, trust_remote_code, not full_size)
    adapter = None if adapter is None else os.path.abspath(adapter)  # the ranks may run elsewhere
    return replace(found, drops_out=bool(dropouts), notes=tuple(notes), lacks=tuple(lacks), adapter=adapter)


def _link(hf_model: str, target: Path) -> None:
    """Links every file of a folder but its config, which gets its dropouts switched off."""
    for path in Path(hf_model).resolve().iterdir():
        if path.name != "config.json" and path.is_file():
            (target / path.name).symlink_to(path)
