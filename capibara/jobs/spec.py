"""What is launched: a verb with its arguments on a slice, as every back end understands it."""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from collections.abc import Mapping

from capibara.core.types import UserError
from capibara.jobs.secrets import Secret, check_public, has_secret
from capibara.planner.hardware.slices import Slice

# Of Kubernetes (a pod's name is the job's and up to 20 characters more), Compute Engine and Slurm alike.
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
_LABEL_KEY = re.compile(r"[a-z]([a-z0-9_-]{0,61}[a-z0-9])?")
_LABEL_VALUE = re.compile(r"([a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Variables of the shell, and of the scripts that back ends write.
_SHELLS = re.compile(r"PATH|IFS|U?E?UID|PPID|SHELLOPTS|BASH.*|capibara_.*")
_MOST_RESTARTS, _LONGEST_GRACE_S = 10_000, 7 * 86_400
_LONGEST_S = 10 * 365 * 86_400.0
# Labels that the back ends set themselves: by these a lost database is rebuilt.
OWN_LABELS = (
    "capibara-job",
    "capibara-spec",
    "capibara-launch",
    "capibara-attempt",
    "capibara-failures",
    "capibara-spent",
)


class Capacity(enum.StrEnum):
    """How chips are paid for.

    Attributes:
      ON_DEMAND: at the list price, until the job ends.
      SPOT: cheaper; they can be taken away at any time, and the job resumes when there are others.
      RESERVED: of a reservation.
    """

    ON_DEMAND = "on_demand"
    SPOT = "spot"
    RESERVED = "reserved"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bundle:
    """The files that a job needs, in a folder of a store: Gin files in `gin/`, and perhaps a wheel.

    Attributes:
      url: the folder; its last part is the job's hash.
      files: path within the folder -> SHA-256 of its content, in hexadecimal digits.
    """

    url: str
    files: Mapping[str, str]

    @property
    def wheel(self) -> str | None:
        """The path of the wheel within the folder; None: the image has capibara."""
        return next((path for path in self.files if path.endswith(".whl")), None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """Which of the resources that a job has one after the other; each has it in its labels.

    Attributes:
      launch: of the job, in hexadecimal digits; a job that is launched once more has another one.
      number: of earlier resources of this launch.
      failures: how many of these have failed; those that were preempted do not count.
      spent_s: the seconds that these had chips.
    """

    launch: str = "0"
    number: int = 0
    failures: int = 0
    spent_s: int = 0

    @property
    def labels(self) -> dict[str, str]:
        """The labels of its resource."""
        return {
            "capibara-launch": self.launch,
            "capibara-attempt": str(self.number),
            "capibara-failures": str(self.failures),
            "capibara-spent": str(self.spent_s),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A job: one verb on one slice, or on several of one kind.

    Attributes:
      name: letters, digits and hyphens; unique where it runs.
      slice_: the chips.
      verb: of capibara.
      arguments: of the verb; Gin files by their names in the bundle.
      bundle: the files that the job needs.
      image: container image that has capibara; None: a back end that needs none installs the bundle's wheel.
      environment: variable -> value, which anyone may read.
      secrets: variables whose values stand elsewhere.
      restarts: the most restarts of the verb on chips that remain, and of the job on new ones.
      grace_s: seconds between SIGTERM and SIGKILL, in which a run saves a checkpoint.
      labels: of all that is created.
      priority: the name of a priority class, for back ends that have them.
      capacity: how the chips are paid for.
      reservation: its name, for capacity that is reserved.
      budget_usd: the job ends before its chips cost more, at `usd_per_chip_hour`.
      usd_per_chip_hour: the actual price; None: the list price on demand.
      digest: of the job's own file (`spec_file`), in hexadecimal digits; empty: it has none.
      attempt: which of the job's resources this is.
    """

    name: str
    slice_: Slice
    verb: str = "train"
    arguments: tuple[str, ...] = ()
    bundle: Bundle
    image: str | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    secrets: tuple[Secret, ...] = ()
    restarts: int = 10
    grace_s: int = 300
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    priority: str | None = None
    capacity: Capacity = Capacity.ON_DEMAND
    reservation: str | None = None
    budget_usd: float | None = None
    usd_per_chip_hour: float | None = None
    digest: str = ""
    attempt: Attempt = Attempt()

    def __post_init__(self) -> None:
        if self.capacity not in [*Capacity]:
            raise UserError(f"--capacity={self.capacity} must be one of {', '.join(Capacity)}")
        object.__setattr__(self, "capacity", Capacity(self.capacity))
        self._check_secrets()  # before any message that repeats a text
        if not _NAME.fullmatch(self.name):
            raise UserError(
                f"job name {self.name!r} must be 1 to 40 lower-case letters, digits and hyphens, a letter first and no "
                f"hyphen last: try --name={near_name(self.name)}"
            )
        _check_labels(self.labels)
        for variable, value in self.environment.items():
            if not _VARIABLE.fullmatch(variable):
                raise UserError(f"--env={variable}=... must name a variable in letters, digits and _, no digit first")
            if _SHELLS.fullmatch(variable):
                raise UserError(f"--env={variable}=... is a variable of the shell: omit it")
            if not _is_line(value):
                raise UserError(f"--env={variable}=... must be one line of text")
            check_public(variable, value)
        texts = {"--image": self.image, "--priority": self.priority, "--reservation": self.reservation}
        for flag, text in {**texts, "--storage": self.bundle.url}.items():
            if text is not None and not (text and _is_line(text) and " " not in text and text[0] != "-"):
                raise UserError(f"{flag}={text!r} must be one word that begins with no -")
        if not (0 <= self.restarts <= _MOST_RESTARTS and 0 <= self.grace_s <= _LONGEST_GRACE_S):
            raise UserError(
                f"--restarts ({self.restarts}) must be from 0 to {_MOST_RESTARTS}, --grace ({self.grace_s}) from 0 to "
                f"{_LONGEST_GRACE_S} s"
            )
        if (self.reservation is not None) != (self.capacity is Capacity.RESERVED):
            has, other = ("is set", "reserved") if self.reservation else ("is not set", "on_demand or spot")
            raise UserError(f"--reservation {has}, but --capacity is {self.capacity}, not {other}: change one of them")
        self._check_budget()

    def _check_secrets(self) -> None:
        """No value of a secret stands where it can be read, and each variable has one value."""
        plain = (
            self.name,
            self.image,
            self.priority,
            self.reservation,
            *self.arguments,
            *self.labels,
            *self.labels.values(),
        )
        if any(text is not None and has_secret(text) for text in plain) or has_secret(
            self.bundle.url.replace("/", " ")
        ):
            raise UserError(
                "a flag, a binding or a label looks like a secret, and everyone who sees the job could read it: use --secret"
            )
        variables = [*self.environment, *(secret.variable for secret in self.secrets)]
        for secret in self.secrets:
            if _SHELLS.fullmatch(secret.variable):
                raise UserError(f"--secret={secret.variable}=... is a variable of the shell: choose another name")
            if variables.count(secret.variable) > 1:
                raise UserError(f"{secret.variable} is set twice by --env and --secret: omit one of them")

    def _check_budget(self) -> None:
        for name, value in (("--budget_usd", self.budget_usd), ("--usd_per_chip_hour", self.usd_per_chip_hour)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UserError(f"{name} is {value}, must be positive and finite")
        if self.budget_usd is not None and self.usd_per_hour is None:
            raise UserError(
                f"--budget_usd={self.budget_usd:g} needs a price, and {self.slice_.name} has no list price: add "
                "--usd_per_chip_hour=..."
            )
        if self.longest_s is not None and self.longest_s > _LONGEST_S:
            raise UserError(
                f"--budget_usd={self.budget_usd:g} buys more than ten years of {self.slice_.name}: lower it"
            )
        if self.longest_s is not None and self.longest_s < 60:
            raise UserError(
                f"--budget_usd={self.budget_usd:g} buys {self.longest_s:.0f} s of {self.slice_.name} at "
                f"{self.usd_per_hour:.2f} USD an hour, must be at least a minute: raise it to "
                f"{math.ceil(self.usd_per_hour or 0.0)} for an hour"
            )

    @property
    def usd_per_hour(self) -> float | None:
        """The price of all its chips; None if it is unknown."""
        return self.slice_.price_per_hour(self.usd_per_chip_hour)

    @property
    def longest_s(self) -> float | None:
        """The seconds of all chips that the budget pays for; None: there is no budget."""
        if self.budget_usd is None or self.usd_per_hour is None:
            return None
        return 3600 * self.budget_usd / self.usd_per_hour

    @property
    def left_s(self) -> float | None:
        """Those that earlier attempts have left; None: there is no budget."""
        return None if self.longest_s is None else max(1.0, self.longest_s - self.attempt.spent_s)

    @property
    def folder(self) -> str:
        """The job's folder in the storage, which has its bundles, its own file and its hosts' reports."""
        return self.bundle.url.rpartition("/")[0]

    @property
    def reports(self) -> str:
        """The folder for the reports of this attempt's hosts."""
        return f"{self.folder}/reports/{self.attempt.launch}-{self.attempt.number}"

    @property
    def all_labels(self) -> dict[str, str]:
        """The labels of what is created: the user's, and those by which it is found again."""
        digest = {"capibara-spec": self.digest} if self.digest else {}
        return {"capibara-job": self.name, **digest, **self.attempt.labels, **self.labels}


def _check_labels(labels: Mapping[str, str]) -> None:
    for key, value in labels.items():
        if key in OWN_LABELS:
            raise UserError(f"--label={key}=... is set by capibara itself: choose another name")
        for subject, text, pattern in (("name", key, _LABEL_KEY), ("value", value, _LABEL_VALUE)):
            if not pattern.fullmatch(text):
                raise UserError(
                    f"--label={key}={value}: the {subject} {text!r} must be at most 63 lower-case letters, digits, - and _, "
                    f"{'a letter' if subject == 'name' else 'a letter or digit'} first and no sign last"
                )


def _is_line(text: str) -> bool:
    signs = "\x7f\x85\u2028\u2029"
    return not any(ord(letter) < 32 or letter in signs or "\ud800" <= letter <= "\udfff" for letter in text)


def near_name(name: str) -> str:
    """A valid name of a job that is like a text."""
    near = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].rstrip("-")
    return near if _NAME.fullmatch(near) else f"job-{near}"[:40].rstrip("-")
