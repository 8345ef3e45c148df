"""What starts and stops the runs of a sweep: on this machine (`local`), or as jobs."""

from __future__ import annotations

import dataclasses
import enum
from typing import Protocol

from capibara.jobs.sweeps.trial import Trial


class Progress(enum.StrEnum):
    """Where a trial's run is.

    Attributes:
      RUNNING: it runs, or waits for chips, or to be restarted.
      SUCCEEDED: it has ended well.
      FAILED: it has ended otherwise, and will not be restarted; or it is not there.
    """

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True)
class Status:
    """Where a trial's run is, and for one that failed why, in a line."""

    progress: Progress
    reason: str = ""


class Launcher(Protocol):
    """Starts and stops the runs of a sweep; the trial's name says which, its statements what it runs.

    Every method may raise TryAgain, after which it is called again at the next poll, and UserError, which ends the sweep.
    """

    def knows(self, trial: Trial) -> bool:
        """Whether a trial's run was started, and its state is known: by this process, or by an earlier one."""
        ...

    def start(self, trial: Trial) -> None:
        """Starts a trial's run; does nothing if it was started, by this process or by an earlier one."""
        ...

    def state(self, trial: Trial) -> Status:
        """Where the run of a trial that was started is; FAILED for one that is not there any more."""
        ...

    def stop(self, trial: Trial) -> None:
        """Begins to end a trial's run; does nothing if it is not there. Its state is RUNNING until it has ended."""
        ...
