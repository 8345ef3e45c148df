"""What a system for jobs does with a job's resources: it makes, lists and deletes them, and has their log.

A job has one resource after the other (`Attempt`): a queued resource, a JobSet, a custom job, a batch job, or a folder with
processes. All have the job's labels. None of these calls retries or waits: the manager calls again later.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import re
from collections.abc import Iterator, Mapping
from typing import ClassVar

from capibara.core.types import TryAgain, UserError
from capibara.jobs.spec import Attempt, JobSpec

CALL_S = 30.0  # a call that has no answer after so long has failed


class Phase(enum.StrEnum):
    """Where a resource is in its life.

    Attributes:
      WAITING: for chips, or for its hosts to start.
      RUNNING: it has chips.
      SUCCEEDED: the run has ended well; only of systems that know.
      FAILED: it has ended otherwise, and does not start again by itself.
      PREEMPTED: its chips were taken away, and it does not start again by itself.
      CANCELLED: somebody has ended it, not by this record.
      DELETING: it is being deleted, or its chips are being taken away: wait until it is gone or another phase.
    """

    WAITING = "waiting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    PREEMPTED = "preempted"
    CANCELLED = "cancelled"
    DELETING = "deleting"

    @property
    def has_ended(self) -> bool:
        """Whether its run will not start again by itself."""
        return self in (Phase.SUCCEEDED, Phase.FAILED, Phase.PREEMPTED, Phase.CANCELLED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resource:
    """What a system has of a job.

    Attributes:
      id: by which the system knows it.
      labels: of the job, as `JobSpec.all_labels`.
      phase: where it is in its life.
      reason: why, in the system's words, in one line; may be empty.
      created_s: when it was made, in seconds since 1970; 0.0: the system does not say.
      is_partial: not all of it was made, since a submission was interrupted: `submit` makes the rest.
      is_denied: it has failed because a quota or a right is missing, which a new attempt would not mend.
    """

    id: str
    labels: Mapping[str, str]
    phase: Phase
    reason: str = ""
    created_s: float = 0.0
    is_partial: bool = False
    is_denied: bool = False

    @property
    def job(self) -> str:
        """The job's name."""
        return self.labels.get("capibara-job", "")

    @property
    def attempt(self) -> Attempt:
        """Which attempt it is; labels that are no numbers count as 0."""

        def number(name: str) -> int:
            text = self.labels.get(f"capibara-{name}", "")
            return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else 0

        return Attempt(
            launch=self.labels.get("capibara-launch", "0"),
            number=number("attempt"),
            failures=number("failures"),
            spent_s=number("spent"),
        )


class Busy(TryAgain):
    """The system does not answer, or not now: 429, 5xx, a call that took too long, half an answer.

    Args:
      message: one line.
      after_s: seconds that the system asks to wait; None: it does not say.
    """

    def __init__(self, message: str, after_s: float | None = None):
        super().__init__(message)
        self.after_s = after_s


class Denied(UserError):
    """A right or a quota is missing; the message says which, and what to ask for."""


class Exists(Exception):
    """A resource of that name exists already; the argument is its name."""


class System(abc.ABC):
    """A system for jobs, at the place that a back end's fields name.

    Attributes:
      knows_result: its phases say how a run has ended; otherwise only the hosts' reports do.
      ended_costs: a resource that has ended costs money until it is deleted.
      has_unique_names: a name is taken until its resource is deleted. Otherwise resources that have ended stay listed and
        cannot be deleted, names can be taken twice, and a submission that is repeated makes a second resource.
      repeats_delete: a deletion has several steps, and each call does the next one.

    Every method may raise Busy, after which the same call may succeed, and Denied, after which it will not. Several threads
    call at once.
    """

    knows_result: ClassVar[bool] = True
    ended_costs: ClassVar[bool] = False
    has_unique_names: ClassVar[bool] = True
    repeats_delete: ClassVar[bool] = False

    @abc.abstractmethod
    def submit(self, spec: JobSpec) -> None:
        """Makes the resource of a job's attempt.

        Raises:
          Exists: there is one of that name, of this attempt or of another one.
          UserError: the system refuses the job.
        """

    @abc.abstractmethod
    def resources(self) -> list[Resource]:
        """All resources that have a job's labels, of all jobs; ended ones too, as long as the system lists them."""

    @abc.abstractmethod
    def delete(self, resource: Resource) -> None:
        """Begins to delete a resource, or to cancel what the system keeps on record; does nothing if it is gone."""

    @abc.abstractmethod
    def log(self, spec: JobSpec, resource: Resource) -> Iterator[str]:
        """The lines of its log so far, without their ends; systems that have none say where it is."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes its connections."""
