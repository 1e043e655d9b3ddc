"""Stages whose first layers are recomputed and whose others are not (``--recompute-method block``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megasched.planner.measure.alike import Alike

if TYPE_CHECKING:
    from megasched.planner.measure.build_stage import Setting
    from megasched.planner.measure.measurements import Measurements
    from megasched.planner.measure.parameter_counts import ParameterCounts
    from megasched.planner.measure.probe import Measured
    from megasched.trainer.stages.stage import Stage


class PartlyRecomputed(Alike):
    """Answers as ``Measurements`` do.

    Args:
        plain: without recompute.
        full: with all layers recomputed.
        count: layers of each stage that are recomputed, its first ones; at least one.
    """

    def __init__(self, plain: Measurements, full: Measurements, count: int) -> None:
        super().__init__(full.kinds)
        self.plain, self.full, self.count = plain, full, count

    @property
    def setting(self) -> Setting:
        return self.full.setting

    @property
    def parameters(self) -> ParameterCounts:
        return self.full.parameters

    @property
    def held(self) -> int:
        """Bytes alive from step to step beside parameters."""
        return max(self.plain.held, self.full.held)

    def layer(self, index: int) -> Measured:
        """Without recompute: what it sends is the same."""
        return self.plain.layer(index)

    def layers_of(self, stage: Stage) -> list[Measured]:
        """Each as in the middle of the model."""
        first_kept = stage.start + self.count
        return [
            (self.full if index < first_kept else self.plain).layer(index)
            for index in range(stage.start, stage.stop)
        ]

    def end(self, stage: Stage) -> tuple[Measured, int]:
        """As ``Measurements.end``; the last layer is kept where the stage has more than are recomputed."""
        at_the_last = stage.last and not stage.first
        kept = at_the_last and stage.stop - stage.start > self.count
        return (self.plain if kept else self.full).end(stage)
