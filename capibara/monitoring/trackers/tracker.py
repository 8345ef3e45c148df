"""The protocol of trackers: services and files that show runs, fed from metrics.jsonl outside of the training process.

A tracker of your own is a configurable dataclass in a module that your Gin file imports:

    @configurable
    @dataclasses.dataclass(kw_only=True)
    class Lines(Tracker):
        path: str = "lines.txt"

        def log(self, moment, metrics):
            with open(self.path, "a") as file:
                print(moment.step, dict(metrics), file=file)

and `Monitoring.trackers = (@Lines(),)`.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from capibara.core.types import UserError

ADDRESS = {
    "capibara": "address"
}  # metadata of a field that names a server or file: not taken from a foreign run folder


class Refused(Exception):
    """Raised by a tracker for what its service will never take: it is skipped, and the user reads why.

    Any other exception is a failure: the tracker is started again later, and gets the same lines.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run as a tracker sees it. Texts are redacted: they hold nothing that looks like a token.

    Attributes:
      name: the last part of the run folder's path.
      folder: the run folder.
      uid: 32 hexadecimal digits, the same at every start of the run, of no other run.
      run_id: what `Tracker.start` returned before; None: it is the first time.
      config: the operative configuration, by parameter: {"Trainer.steps": "100"}.
      config_text: the same as Gin text.
      scratch: a local folder for files of the tracker's client; it outlives the process.
      say: prints a line in the output of the training process; what a tracker prints itself is dropped.
    """

    name: str
    folder: str
    uid: str
    run_id: str | None
    config: Mapping[str, str]
    config_text: str
    scratch: str
    say: Callable[[str], None] = print

    @property
    def values(self) -> dict[str, Any]:
        """The configuration with numbers, strings, booleans, None and sequences of them as such, other values as text."""
        return {name: _value(text) for name, text in self.config.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class Moment:
    """When something was logged.

    Attributes:
      step: the training step. It goes back where a run resumes from a checkpoint, or rolls back.
      time_s: seconds since 1970.
      line: the number of the line in metrics.jsonl, from 0; it never goes back.
    """

    step: int
    time_s: float
    line: int


def addresses(tracker: Tracker) -> dict[str, Any]:
    """The fields of a tracker that name servers or files, and that are set, with their values."""
    fields: tuple[dataclasses.Field[Any], ...] = (
        dataclasses.fields(tracker) if dataclasses.is_dataclass(tracker) else ()
    )
    result = {field.name: getattr(tracker, field.name) for field in fields if field.metadata == ADDRESS}
    return {name: value for name, value in result.items() if value is not None}


def check_address(name: str, address: str | None, instead: str) -> None:
    """Raises UserError if an address has a password, which config.gin would hold.

    Args:
      name: of the field.
      address: its value.
      instead: the environment variables for secrets.
    """
    if address is not None and re.match(r"[\w+.-]+://[^/@]*:[^/@]*@", address):
        raise UserError(f"{name} has a password, which would be written to config.gin: set {instead}")


class Tracker:
    """Base class of trackers: override what you need.

    A tracker lives in a process of its own and may take its time, block or raise: it is started again later, and gets all
    lines since its last `flush` that returned True.
    """

    @property
    def label(self) -> str:
        """The name in messages, of its file in the run folder, and of `capibara track --to`."""
        return type(self).__name__.removesuffix("Tracker").lower() or type(self).__name__

    def start(self, run: TrackedRun) -> str | None:
        """Begins to track a run, or continues that of `run.run_id`; returns the service's name (id) of it, if it has one."""
        return None

    @property
    def url(self) -> str | None:
        """Where the run is seen, after `start`; None: nowhere."""
        return None

    def log(self, moment: Moment, metrics: Mapping[str, float]) -> None:
        """Finite numbers by name: train/loss, eval/loss, system/host_memory_bytes, spent/save_s."""

    def text(self, moment: Moment, name: str, text: str) -> None:
        """A text: "config.gin", "lineage.jsonl", or "sample/PROMPT", which is the prompt and its continuation."""

    def facts(self, moment: Moment, facts: Mapping[str, object]) -> None:
        """JSON values about the run: machine, packages, devices, git state, data sets; once a start."""

    def picture(self, moment: Moment, name: str, path: str) -> None:
        """A picture that the run has written, such as loss_curve.png; `path` is that of a local file."""

    def roll_back(self, moment: Moment) -> None:
        """The run is back at `moment.step`: what was logged of later steps is void, and will be logged again."""

    def flush(self) -> bool:
        """Called after a batch of lines; whether everything so far is safe, even if this process is killed now."""
        return True

    def finish(self, reason: str) -> None:
        """The run has ended, or is interrupted; everything is safe when this returns.

        `reason` is "finished", "early_stopping", "privacy_budget", "interrupted", or "crashed".
        """


def _value(text: str) -> Any:
    try:
        result = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text
    return list(result) if isinstance(result, tuple) else result
