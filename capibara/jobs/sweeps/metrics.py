"""The metric of a trial, as its run reports it in metrics.jsonl."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping

from capibara.core.fields import did_you_mean
from capibara.core.types import TryAgain, UserError
from capibara.storage import outputs, stores

_FILE = "metrics.jsonl"  # in a run folder; written by monitoring.trackers.loggers
_NAME = re.compile(r"(train|eval)/(\S+)")
_AGAIN = ("start", "roll_back")  # events after which the steps that follow are repeated
_NO_METRICS = ("kind", "step", "time")

Point = tuple[int, float]  # step and value
Record = Mapping[str, object]


@dataclasses.dataclass(frozen=True)
class Report:
    """What a run has reported of a metric.

    Attributes:
      points: steps and values, by step. A value of an evaluation may be NaN; a training step without a finite value,
        such as a skipped update, is no point.
      reason: why the run has ended, other than by an interruption; None: it has not.
      names: metrics that it has reported, as Metric's text.
    """

    points: tuple[Point, ...] = ()
    reason: str | None = None
    names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Metric:
    """A metric of the lines of one kind ("train" or "eval"), such as eval/loss."""

    kind: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Metric:
        """The metric of a text such as eval/loss; raises UserError for another text."""
        match = _NAME.fullmatch(text)
        if match is None or match[2] in _NO_METRICS:
            raise UserError(f"--metric={text} must be eval/NAME or train/NAME, such as eval/loss")
        return cls(match[1], match[2])

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"

    def read(self, model_dir: str) -> Report:
        """Reads a run folder; it may have no metrics yet.

        Raises:
          TryAgain: the storage cannot be read.
        """
        path = f"{model_dir}/{_FILE}"
        try:
            return self._of_lines(stores.of(path).lines(outputs.path_in(model_dir, _FILE)))
        except FileNotFoundError:
            return Report()
        except UserError:  # a link out of the folder, a pipe, a line without end
            raise
        except Exception as error:  # of any bucket library
            raise TryAgain(f"{path} cannot be read: {type(error).__name__}: {error}") from None

    def of_text(self, text: str) -> Report:
        """`read` of a text."""
        return self._of_lines(text.encode("utf-8", "surrogatepass").split(b"\n"))

    def _of_lines(self, lines: Iterable[bytes]) -> Report:
        """What the lines report, as if the run had never been interrupted: of repeated steps the last counts."""
        points: dict[int, float] = {}
        names: dict[str, None] = {}
        reason: str | None = None
        for record in _records(lines):
            kind, step, event = record["kind"], record["step"], record.get("event")
            assert isinstance(step, int)
            if kind == "event" and event in _AGAIN:
                points = {old: value for old, value in points.items() if old <= step}
            if kind == "event" and event in ("start", "end"):
                reason = str(record.get("reason")) if event == "end" else None
            if kind in ("train", "eval"):
                names.update((f"{kind}/{name}", None) for name in record if name not in _NO_METRICS)
            if kind == self.kind and self.name in record:
                points.pop(step, None)
                if (value := _number(record[self.name], is_kept=kind == "eval")) is not None:
                    points[step] = value
        return Report(
            points=tuple(sorted(points.items())),
            reason=None if reason == "interrupted" else reason,
            names=tuple(names),
        )

    def is_absent(self, report: Report) -> bool:
        """Whether a run reports metrics of this kind, and this one is not among them: it will not be.

        Metrics of tasks (eval/TASK/NAME) may come later.
        """
        is_reported = any(name.startswith(f"{self.kind}/") for name in report.names)
        return is_reported and "/" not in self.name and str(self) not in report.names

    def missing(self, report: Report) -> str:
        """Why a run that has ended has no value, in a line."""
        if report.points:
            return f"{self} is not finite at step {report.points[-1][0]}"
        hint = did_you_mean(str(self), report.names) if report.names else ": there are no metrics at all"
        return f"the run has not reported {self}{hint}"


def _number(value: object, is_kept: bool) -> float | None:
    """A metric's value, which is null where it is not finite: then NaN, or None."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return math.nan if is_kept else None


def _records(lines: Iterable[bytes]) -> Iterator[Record]:
    """The complete lines."""
    for line in lines:
        try:
            record = json.loads(line.decode("utf-8", errors="replace"))
        except (ValueError, RecursionError):  # the last line of a run that was killed
            continue
        if isinstance(record, dict) and isinstance(record.get("kind"), str) and isinstance(record.get("step"), int):
            yield record
