"""What looks on while a run trains: callbacks, times, limits, and what may stop it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from capibara.core.interrupt import Interrupted, StopRequest
from capibara.multihost.decisions import Decisions
from capibara.objectives.base import Metrics
from capibara.training.base.callbacks import Callback
from capibara.training.evaluation import Evaluator
from capibara.training.metrics import Meter
from capibara.training.profiling.profiler import Profiler
from capibara.training.stability.watchdog import Watchdog


@dataclasses.dataclass(frozen=True)
class Observers:
    """The observers of a run's loop.

    Attributes:
      callbacks: hear of it, on process 0.
      evaluator: evaluates the model.
      stop: whether the run was asked to stop.
      watchdog: ends a run that hangs.
      decisions: proves that all processes do the same.
      meter: averages metrics, and measures times.
      profiler: traces steps.
    """

    callbacks: Callback
    evaluator: Evaluator
    stop: StopRequest
    watchdog: Watchdog
    decisions: Decisions
    meter: Meter
    profiler: Profiler

    @contextlib.contextmanager
    def long_work(self, name: str, action: str, limit: str) -> Iterator[None]:
        """A context for work after which the usual time of a step is measured anew.

        Args:
          name: under which its time is reported.
          action: its name in the error if it hangs.
          limit: the field of Watch that limits each part of it.
        """
        with self.meter.paused(name), self.watchdog.allowing(action, limit):
            yield

    @contextlib.contextmanager
    def between_steps(self, name: str, action: str, limit: str) -> Iterator[None]:
        """As `long_work`, for what belongs to some steps; it ends early if the run is to stop."""
        with self.meter.paused(name), self.watchdog.left_out(action, limit), contextlib.suppress(Interrupted):
            yield

    def profile(self, step: int, metrics: Metrics) -> None:
        """Ends the trace after its last step; writing it does not count as time of the steps."""
        if self.profiler.ends(step):
            with self.long_work("profile", "writing the profile", "save_s"):
                if (result := self.profiler.end(step, metrics)) is not None:
                    self.callbacks.on_profile(step, *result)
