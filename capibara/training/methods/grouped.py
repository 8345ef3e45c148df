"""A run whose model meets those of other runs, each a job of its own (`Trainer.group`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import ClassVar

from capibara.core.types import Params, PyTree, UserError
from capibara.objectives.base import Metrics
from capibara.objectives.batches import Reporter
from capibara.training.base.adopted import Adopted, Score
from capibara.training.base.group import Group, Member
from capibara.training.base.options import InitWith, RunOptions
from capibara.training.methods.hooks import Hooks
from capibara.training.methods.method import Method, check_rounds
from capibara.training.stability.anomalies import OnSpike


@dataclasses.dataclass(frozen=True)
class Grouped(Method):
    """Trains as a plain run, and goes on from the group's model after each round.

    Attributes:
      group: where they meet.
    """

    field: ClassVar[str] = "group"

    group: Group

    @property
    def configured(self) -> object:
        return self.group

    def unsupported(self, options: RunOptions) -> Mapping[str, bool]:
        return {
            "Trainer.init_with = 'state'": options.init_with is InitWith.STATE,
            "Anomalies.on_spike = 'roll_back'": options.anomalies.on_spike is OnSpike.ROLL_BACK,
        }

    def check(self, options: RunOptions) -> None:
        super().check(options)
        check_rounds(options, self.group.round_steps, type(self.group).__name__)

    def check_start(self) -> None:
        self.group.check()

    @property
    def program(self) -> dict[str, str]:
        return {}  # its step is a plain run's

    def hooks(self, options: RunOptions, trained: Params, status: Callable[[str], None]) -> Hooks:
        del trained, status
        return _GroupHooks(options, self.group)


class _GroupHooks(Hooks):
    """Meets the group at the start of the program, and at the end of each round."""

    resumes_at_end = True  # the others may be ahead, and wait for its model

    def __init__(self, options: RunOptions, group: Group):
        super().__init__(options)
        self._group = group
        self._member: Member | None = None
        self._reporter: Reporter | None = None

    def begin(self, trained: PyTree, reporter: Reporter) -> None:
        self._member, self._reporter = self._group.join(trained, reporter), reporter

    def is_due(self, step: int, is_first: bool) -> bool:
        return is_first or step % self._group.round_steps == 0

    def adopt(self, step: int, params: Params, score: Score | None) -> Adopted | None:
        assert self._member is not None and self._reporter is not None, "the loop begins before it meets the group"
        adopted = self._member.meet(step, params, score)
        self._reporter.progress("")
        if adopted is not None and adopted.step > self.options.steps:
            raise UserError(
                f"the group is at step {adopted.step}, beyond Trainer.steps ({self.options.steps}): raise it"
            )
        return adopted

    def watch(self, metrics: Metrics) -> None:
        assert self._member is not None, "the loop begins before its first step"
        self._member.watch(metrics)
