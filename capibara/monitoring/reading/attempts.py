"""Goodput of a run from columns: each attempt's training lines are summed up, then counted by monitoring.goodput."""

from __future__ import annotations

import math

import numpy as np

from capibara.monitoring.metrics_file import goodput
from capibara.monitoring.metrics_file.loggers import AGAIN
from capibara.monitoring.reading.parsing import Era, Record
from capibara.monitoring.reading.tables import View

_SUMS = ("rollout_s", "evaluate_s", "save_s", "start_s", "set_up_s", "restore_s", "reference_s")


class Attempts:
    """The attempts of a run, from one start or roll-back to the next; only the last one's lines are needed as they are."""

    def __init__(self) -> None:
        self._closed: list[Record] = []
        self._open: list[Record] = []
        self._begin = 0  # row of the table with which the open attempt begins
        self._end_s = -math.inf
        self._so_far = _Sums(0)  # of the open attempt's rows

    @property
    def starts(self) -> int:
        """How often the run was started."""
        return sum(again["event"] == "start" for again in self._begins)

    @property
    def resumed(self) -> tuple[int, ...]:
        """The steps above 0 at which the run resumed, but for those that a later start or roll-back made void."""
        steps: list[int] = []
        for again in self._begins:
            steps = [step for step in steps if step <= again["step"]]
            if again["event"] == "start" and again["step"] not in steps:
                steps.append(again["step"])
        return tuple(step for step in steps if step > 0)

    @property
    def _begins(self) -> list[Record]:
        """The starts and roll-backs, in order."""
        return [record for record in (*self._closed, *self._open) if record.get("event") in AGAIN]

    def close(self, again: Record, train: View) -> None:
        """Ends the open attempt; call before the table drops the rows that the next attempt repeats.

        Args:
          again: the event that begins the next attempt.
          train: the training lines so far.
        """
        if self._open:
            self._closed += [*self._open, *self._split(train, again["step"]), self._last_record()]
        if not _is_time(again.get("time")):
            again = {**again, "time": self._end_s if math.isfinite(self._end_s) else 0.0}
        self._open, self._end_s = [again], again["time"]
        self._begin = int(np.searchsorted(train.steps, again["step"], side="right"))
        self._so_far = _Sums(again["step"])

    def add(self, era: Era) -> None:
        """Adds an era's events and times to the open attempt."""
        if not self._open:
            return
        spent = [event for event in era.events if event.get("event") == "spent" and _is_time(event.get("time"))]
        self._open += [{name: value for name, value in item.items() if _is_plain(value)} for item in spent]
        times = [rows.times[np.isfinite(rows.times)] for rows in era.rows.values()]
        newest = [float(time.max()) for time in times if len(time)]
        newest += [event["time"] for event in era.events if _is_time(event.get("time"))]
        newest += [sample.time for sample in era.samples if math.isfinite(sample.time)]
        self._end_s = max([self._end_s, *newest])

    def account(self, train: View) -> dict[str, float]:
        """Seconds by category, as goodput.account; empty: the run has not started."""
        if not self._open:
            return {}
        self._follow(train)
        return goodput.account([*self._closed, *self._open, *self._so_far.records(), self._last_record()])

    def forget_rows(self, train: View, count: int) -> None:
        """Sums up the open attempt's lines so far, when rows are dropped from memory.

        Args:
          train: all rows.
          count: how many are left: those that are added later count.
        """
        if self._open:
            self._follow(train)
            self._open += self._so_far.records()
            self._begin, self._so_far = count, _Sums(self._so_far.last)

    def _follow(self, train: View) -> None:
        """Adds the rows that are new since the last time."""
        begin = self._begin + self._so_far.rows
        if len(train) < begin or begin > self._begin and int(train.steps[begin - 1]) != self._so_far.last:
            self._so_far, begin = _Sums(self._so_far.first), self._begin  # lines were written out of order
        self._so_far.add(train, slice(begin, len(train)))

    def _split(self, train: View, kept_steps: int) -> list[Record]:
        """The open attempt's rows, divided at the step from which its steps were repeated."""
        begin = min(self._begin, len(train))
        inner = begin + int(np.searchsorted(train.steps[begin:], kept_steps, side="right"))
        last, records = self._so_far.first, list[Record]()
        for rows in (slice(begin, inner), slice(inner, inner + 1), slice(inner + 1, len(train))):
            sums = _Sums(last)
            sums.add(train, rows)
            last = sums.last
            records += sums.records()
        return records

    def _last_record(self) -> Record:
        """Says when the open attempt's last line was written."""
        return {"kind": "eval", "step": self._open[0]["step"], "time": self._end_s}


class _Sums:
    """Training lines as one record of which the goodput is the same.

    Attributes:
      first, last: the steps before the first line, and before the next one.
      rows: lines so far.
    """

    def __init__(self, first: int):
        self.first = self.last = first
        self.rows = 0
        self._steps, self._sums = 0, dict.fromkeys(("step_s", "data_wait_s", *_SUMS), 0.0)

    def add(self, train: View, rows: slice) -> None:
        """Adds lines."""
        steps = train.steps[rows]
        if not len(steps):
            return
        counts = np.maximum(0, np.diff(steps, prepend=self.last))
        for name in self._sums:
            column = _column(train, name, rows)
            with np.errstate(over="ignore"):  # of absurd durations, which goodput.account does not count
                self._sums[name] += float((column if name in _SUMS else column * counts).sum())
        self._steps += int(counts.sum())
        self.last, self.rows = int(steps[-1]), self.rows + len(steps)

    def records(self) -> list[Record]:
        """One record, or none."""
        if not self.rows:
            return []
        means = {name: self._sums[name] / max(1, self._steps) for name in ("step_s", "data_wait_s")}
        return [{"kind": "train", "step": self.last, "time": -math.inf, **self._sums, **means}]


def _column(train: View, name: str, rows: slice) -> np.ndarray:
    """A metric with 0 where there is no number."""
    column = train.columns.get(name)
    if column is None:
        return np.zeros(len(train.steps[rows]))
    return np.where(np.isfinite(column[rows]), column[rows], 0.0)


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _is_plain(value: object) -> bool:
    return isinstance(value, str) or _is_time(value)
