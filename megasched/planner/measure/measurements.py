"""What the stages of a session were measured to take; each kind of them is measured once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megasched.planner.measure.alike import Alike
from megasched.planner.measure.build_stage import Setting
from megasched.planner.measure.kinds import layer_kinds
from megasched.planner.measure.parameter_counts import ParameterCounts
from megasched.planner.measure.probe import Measured, measure
from megasched.trainer.stages.stage import Stage

if TYPE_CHECKING:
    from megasched.trainer.session import Session


class Measurements(Alike):
    """Stages of one layer, from which stages of any number are put together. Lives inside ``fake_groups``.

    Args:
        like: of the same session in another setting.
    """

    def __init__(self, session: Session, setting: Setting, like: Measurements | None = None) -> None:
        super().__init__(layer_kinds(session.replaced, session.plan) if like is None else like.kinds)
        self.session, self.setting = session, setting
        self.parameters = ParameterCounts(session) if like is None else like.parameters
        self._measured: dict[Stage, Measured] = {}

    @property
    def held(self) -> int:
        """Bytes alive from step to step beside parameters."""
        return max(measured.held for measured in self._measured.values())

    def layer(self, index: int) -> Measured:
        """Of a stage with that layer alone, in the middle of the model."""
        kind = self.kinds[index]
        return self._stage(Stage(kind, kind + 1, False, False))

    def layers_of(self, stage: Stage) -> list[Measured]:
        """Of each layer of a stage, as in the middle of the model."""
        return [self.layer(index) for index in range(stage.start, stage.stop)]

    def end(self, stage: Stage) -> tuple[Measured, int]:
        """Of one layer of a stage with what the stage has before and after its layers, and which layer that is: 0,
        or -1 for the last one."""
        if stage.last and not stage.first:
            return self._stage(Stage(stage.stop - 1, stage.stop, False, True)), -1
        if stage.first:
            return self._stage(Stage(stage.start, stage.start + 1, True, stage.last)), 0
        return self.layer(stage.start), 0

    def _stage(self, stage: Stage) -> Measured:
        if stage not in self._measured:
            self._measured[stage] = measure(self.session, stage, self.setting)
        return self._measured[stage]
