"""What a training method does around the steps of one run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import jax
from jax.sharding import Mesh

from capibara.core.types import Params, PyTree
from capibara.objectives.base import Metrics
from capibara.objectives.batches import Reporter
from capibara.training.base.adopted import Adopted, Score
from capibara.training.base.options import RunOptions


class Hooks:
    """The hooks of a plain run: override what differs. They are called on every process, in the same order.

    Args:
      options: of the run.

    Attributes:
      resumes_at_end: whether a run that has made all of its steps may start again.
    """

    resumes_at_end = False

    def __init__(self, options: RunOptions):
        self.options = options

    # How far the run goes.

    @property
    def last_step(self) -> int:
        """The step at which the run ends, unless it is stopped earlier."""
        return self.options.steps

    @property
    def reason(self) -> str:
        """Why it ends at `last_step`: the `Outcome.reason` that callbacks hear."""
        return "finished"

    def check_resumed(self, step: int) -> None:
        """Raises UserError if a run of `step` completed steps must not resume."""

    def ended(self, step: int) -> str:
        """The error of a start that finds the run at `last_step` or beyond."""
        return f"the run is at step {step} of {self.options.steps} already: raise TRAIN_STEPS (--gin.TRAIN_STEPS=...) to continue"

    def closing(self, step: int) -> str | None:
        """A line for the user at the end of the run; None: there is none."""
        del step
        return None

    # Before the first step.

    def constants(self, mesh: Mesh) -> dict[str, jax.Array]:
        """The arrays of `Method.batch_spec`, new at each start."""
        del mesh
        return {}

    def begin(self, trained: PyTree, reporter: Reporter) -> None:
        """Called before the first step of a start.

        Args:
          trained: the trained parameters as jax.ShapeDtypeStruct with their shardings.
          reporter: of the loop.
        """

    # Between two steps.

    def is_due(self, step: int, is_first: bool) -> bool:
        """Whether `adopt` is called after `step`; `is_first`: the program starts there."""
        del step, is_first
        return False

    def adopt(self, step: int, params: Params, score: Score | None) -> Adopted | None:
        """The model from which the run goes on in the place of its own; None: from its own.

        It may be called again for the same step, after an interruption too.

        Args:
          step: completed steps.
          params: the run's trained parameters.
          score: of models on the validation split; None: the run has no evaluations.

        Raises:
          Interrupted: the run is to stop.
          UserError: the run must end.
        """
        del step, params, score
        return None

    def watch(self, metrics: Metrics) -> None:
        """Called after each step, with its metrics still on the devices."""

    # At a log.

    def metrics(self, step: int) -> dict[str, float]:
        """Metrics that the method adds to a log."""
        del step
        return {}

    def remarks(self, step: int, metrics: Mapping[str, float]) -> Iterator[str]:
        """Lines for the user on what a step did; called at each log, for each step since the last one.

        Raises:
          UserError: the run must end.
        """
        del step, metrics
        return iter(())
