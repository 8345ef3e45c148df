"""The configuration of a training run."""

from __future__ import annotations

import dataclasses

from capibara.config import configurable
from capibara.consensus.privacy import Privacy
from capibara.training.base.group import Group
from capibara.training.base.options import RunOptions
from capibara.training.base.strategy import Strategy
from capibara.training.methods.method import Method
from capibara.training.methods.selection import select


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer(RunOptions):
    """The configuration of a run: its options, and at most one of these, which decides its training method.

    Attributes:
      strategy: how nodes that train apart (Plan.node) become one model, such as @ConsensusConfig(); None: there is one.
      group: where this run's model meets those of other runs, each a job of its own, such as @GroupNode(); None: nowhere.
      privacy: differential privacy of the documents, such as @Privacy(): DP-SGD, until its budget is spent; None: without.
      method: a training method of your own; None: one of capibara's.
    """

    strategy: Strategy | None = None
    group: Group | None = None
    privacy: Privacy | None = None
    method: Method | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.training_method.check(self)

    @property
    def training_method(self) -> Method:
        """The training method of the run."""
        return select(strategy=self.strategy, group=self.group, privacy=self.privacy, method=self.method)
