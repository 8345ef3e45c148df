"""A trial of a sweep: its bindings, how far it is, and the file that keeps both."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Mapping

from capibara.core.types import UserError
from capibara.jobs.sweeps.metrics import Point


class State(enum.StrEnum):
    """How far a trial is.

    Attributes:
      PENDING: its values are chosen; it may have been started.
      RUNNING: it was started.
      STOPPED: it was stopped early.
      DONE: it has ended well, and has a value.
      FAILED: it has ended otherwise.
    """

    PENDING = "pending"
    RUNNING = "running"
    STOPPED = "stopped"
    DONE = "done"
    FAILED = "failed"

    @property
    def has_ended(self) -> bool:
        """Whether it is over."""
        return self in (State.STOPPED, State.DONE, State.FAILED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """A run of a sweep.

    Attributes:
      number: from 0.
      key: of this trial, in hexadecimal digits: no other has it, not even one that repeats this one.
      bindings: name -> value, as Gin text.
      model_dir: its run folder; not in the file, since a sweep's folder may be moved.
      state: how far it is.
      points: the metric by step.
      value: the metric at the last step, where it was stopped or is done; None: it has none.
      stop_step: the step at which it was found to be one that is stopped early.
      reason: why it failed, in one line.
    """

    number: int
    key: str = ""
    bindings: Mapping[str, str]
    model_dir: str
    state: State = State.PENDING
    points: tuple[Point, ...] = ()
    value: float | None = None
    stop_step: int | None = None
    reason: str = ""

    @property
    def name(self) -> str:
        """Of its folder and its file, such as 007."""
        return name_of(self.number)

    @property
    def step(self) -> int | None:
        """The last step that has a value; None: none has."""
        return self.points[-1][0] if self.points else None

    @property
    def statements(self) -> list[str]:
        """The Gin statements that make the run this trial: its values and its run folder."""
        texts = {**self.bindings, "Trainer.model_dir": json.dumps(self.model_dir, ensure_ascii=False)}
        return [f"{name} = {text}" for name, text in texts.items()]

    @property
    def shown(self) -> str:
        """Its values in a line."""
        return ", ".join(f"{name} = {text}" for name, text in self.bindings.items())

    def text(self) -> str:
        """The content of its file."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del fields["model_dir"]
        fields["bindings"] = dict(self.bindings)
        fields["points"] = [(step, value if math.isfinite(value) else None) for step, value in self.points]
        return json.dumps(fields, ensure_ascii=False, allow_nan=False) + "\n"


def name_of(number: int) -> str:
    """The name of a trial's folder and file."""
    return f"{number:03d}"


def read_text(text: str, number: int, model_dir: str) -> Trial:
    """The trial of a file's content.

    Raises:
      UserError: it is no such file, or one of another trial.
    """
    try:
        known = json.loads(text)
        if known["number"] != number:
            raise ValueError(f"it is of trial {known['number']}")
        known["state"] = State(known["state"])
        known["points"] = tuple(
            (int(step), math.nan if value is None else float(value)) for step, value in known["points"]
        )
        known["bindings"] = {str(name): str(value) for name, value in known["bindings"].items()}
        return Trial(**known, model_dir=model_dir)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"no file of a trial ({type(error).__name__}: {error}): remove it to repeat the trial"
        ) from None
