"""Measures the stages of a session: one of each kind stands for all that are like it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from torch import nn

from megasched.plan.plan import Plan
from megasched.planner.measure.build_stage import Setting
from megasched.planner.measure.parameter_counts import ParameterCounts
from megasched.planner.measure.probe import Measured, measure
from megasched.trainer.session import Session
from megasched.trainer.stages.stage import Stage

# Attributes that tell layers apart which are alike in all else.
_NUMBERING = ("layer_idx", "layer_id", "layer_index", "block_idx", "idx")


class Measurements:
    """Measures stages of one layer, and puts those of any number together; used inside ``fake_groups``.

    Args:
        like: measurements of the same session in another setting.
    """

    def __init__(self, session: Session, setting: Setting, like: Measurements | None = None) -> None:
        self.session, self.setting = session, setting
        self.kinds = layer_kinds(session.replaced, session.plan) if like is None else like.kinds
        self.parameters = ParameterCounts(session) if like is None else like.parameters
        self._measured: dict[Stage, Measured] = {}
        self._found: dict[Hashable, Any] = {}

    @property
    def held(self) -> int:
        """Returns the bytes alive from step to step besides parameters."""
        return max(measured.held for measured in self._measured.values())

    def layer(self, index: int) -> Measured:
        """Measures a stage with that layer alone, in the middle of the model."""
        kind = self.kinds[index]
        return self._stage(Stage(kind, kind + 1, False, False))

    def layers_of(self, stage: Stage) -> list[Measured]:
        """Measures each layer of a stage, as in the middle of the model."""
        return [self.layer(index) for index in range(stage.start, stage.stop)]

    def end(self, stage: Stage) -> tuple[Measured, int]:
        """Measures one layer of a stage with what the stage has before and after its layers.

        Returns:
            The measurement, and which layer of the stage that is: 0, or -1 for the last one.
        """
        if stage.last and not stage.first:
            return self._stage(Stage(stage.stop - 1, stage.stop, False, True)), -1
        if stage.first:
            return self._stage(Stage(stage.start, stage.start + 1, True, stage.last)), 0
        return self.layer(stage.start), 0

    def look(self, stage: Stage) -> Hashable:
        """Describes a stage by the kinds of its layers and by its ends: stages of equal looks take the same."""
        return (*self.kinds[stage.start : stage.stop], stage.first, stage.last)

    def once[Found](self, find: Callable[[Any, Stage], Found], stage: Stage) -> Found:
        """Returns ``find(self, stage)``, computed once for all stages of the same look."""
        key = find, self.look(stage)
        if key not in self._found:
            self._found[key] = find(self, stage)
        found: Found = self._found[key]
        return found

    def _stage(self, stage: Stage) -> Measured:
        if stage not in self._measured:
            self._measured[stage] = measure(self.session, stage, self.setting)
        return self._measured[stage]


class PartlyRecomputed(Measurements):
    """Puts stages together whose first layers are recomputed and whose other layers are not.

    That is what Megatron does by ``--recompute-method block``. Nothing is measured anew.

    Args:
        plain: measurements without recompute.
        full: measurements with all layers recomputed.
        count: layers of each stage that are recomputed, its first ones; at least one.
    """

    def __init__(self, plain: Measurements, full: Measurements, count: int) -> None:
        super().__init__(full.session, full.setting, full)
        self.plain, self.full, self.count = plain, full, count

    @property
    def held(self) -> int:
        """Returns the bytes alive from step to step besides parameters."""
        return max(self.plain.held, self.full.held)

    def layer(self, index: int) -> Measured:
        """Returns the layer without recompute: what it sends is the same."""
        return self.plain.layer(index)

    def layers_of(self, stage: Stage) -> list[Measured]:
        """Returns each layer as in the middle of the model, the first ``count`` with recompute."""
        first_kept = stage.start + self.count
        return [
            (self.full if index < first_kept else self.plain).layer(index)
            for index in range(stage.start, stage.stop)
        ]

    def end(self, stage: Stage) -> tuple[Measured, int]:
        """See ``Measurements.end``; the last layer is kept where the stage has more than are recomputed."""
        at_the_last = stage.last and not stage.first
        kept = at_the_last and stage.stop - stage.start > self.count
        return (self.plain if kept else self.full).end(stage)


def measurements_of(session: Session, setting: Setting, recompute_num_layers: int | None) -> Measurements:
    """Returns the measurements of a session in a setting; is called inside ``fake_groups``.

    Args:
        recompute_num_layers: layers of each stage that are recomputed, its first ones; None for all.
    """
    measured = Measurements(session, setting)
    if recompute_num_layers is None:
        return measured
    plain = Measurements(session, replace(setting, recompute_granularity=None), measured)
    return PartlyRecomputed(plain, measured, recompute_num_layers)


def layer_kinds(model: nn.Module, plan: Plan) -> list[int]:
    """Returns for each layer the first one that is like it: the same modules, settings, shards and records.

    Args:
        model: the definition, replacements made.
        plan: made for it; its structure must be known.
    """
    structure = plan.stack
    records: dict[str, list[Hashable]] = {}
    for record in plan.records:
        records.setdefault(record.path, []).append((record.primitive, repr(sorted(record.arguments.items()))))
    first: dict[Hashable, int] = {}
    return [
        first.setdefault(_look(model.get_submodule(path), path, plan, records), index)
        for index, path in enumerate(map(structure.layer_path, range(structure.count)))
    ]


def _look(layer: nn.Module, path: str, plan: Plan, records: dict[str, list[Hashable]]) -> Hashable:
    found: list[Hashable] = []
    for relative, module in layer.named_modules():
        whole = f"{path}.{relative}" if relative else path
        settings = [(k, v) for k, v in vars(module).items() if _is_setting(k, v)]
        shapes = [
            (name, plan.local_shape(plan.placements[plan.canonical[f"{whole}.{name}"]]))
            for name, _ in module.named_parameters(recurse=False)
        ]
        found.append((relative, type(module), tuple(settings), tuple(shapes), tuple(records.get(whole, ()))))
    return tuple(found)


def _is_setting(name: str, value: Any) -> bool:
    return isinstance(value, bool | int | float | str) and name not in _NUMBERING and not name.startswith("_")
