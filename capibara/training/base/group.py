"""The interface of `Trainer.group`: where a run's model meets those of other runs, each a job of its own."""

from __future__ import annotations

import abc

from capibara.core.types import Params, PyTree
from capibara.objectives.base import Metrics
from capibara.objectives.batches import Reporter
from capibara.training.base.adopted import Adopted, Score


class Member(abc.ABC):
    """A run's part in its group; made once for a run, called on every process."""

    @abc.abstractmethod
    def watch(self, metrics: Metrics) -> None:
        """Records the metrics of a step, still on the devices."""

    @abc.abstractmethod
    def meet(self, step: int, params: Params, score: Score | None = None) -> Adopted | None:
        """Meets the group at the start of the program, and at the end of each round; waits for the others.

        It may be called again for the same step, after an interruption too.

        Args:
          step: completed steps.
          params: the run's trained parameters.
          score: of models on which the group votes; None: the run has no validation data.

        Returns:
          The model to go on from; None: the run goes on from its own, because no round has ended.

        Raises:
          Interrupted: the run is to stop.
          UserError: the group has ended, has other parameters, or does not answer.
        """


class Group(abc.ABC):
    """Configuration of a run's part in a group."""

    @property
    @abc.abstractmethod
    def round_steps(self) -> int:
        """Steps from one round to the next."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raises UserError for what is wrong before anything is compiled; called on every process."""

    @abc.abstractmethod
    def join(self, params: PyTree, reporter: Reporter) -> Member:
        """Joins the group.

        Args:
          params: the trained parameters as jax.ShapeDtypeStruct with their shardings.
          reporter: of the loop.
        """
