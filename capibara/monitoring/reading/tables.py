"""Metrics of a run in columns, as if the run had never been interrupted."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from capibara.monitoring.reading.parsing import MISSING, Rows, joined

_LEAST_CAPACITY = 64
MOST_METRICS = 4096  # of one kind of line


@dataclasses.dataclass(frozen=True)
class View:
    """The rows of a table at one moment.

    Attributes:
      steps: int64 [n], ascending.
      times: float64 [n].
      columns: metric -> float64 [n]; see parsing.MISSING and NOT_FINITE.
    """

    steps: np.ndarray
    times: np.ndarray
    columns: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.steps)

    def points(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and finite values [m] of a metric; empty: there are none."""
        if name not in self.columns:
            return np.empty(0, np.int64), np.empty(0)
        finite = np.isfinite(self.columns[name])
        return self.steps[finite], self.columns[name][finite]

    def last(self, name: str) -> float | None:
        """The newest finite value of a metric; None: there is none in the newest rows."""
        column = self.columns.get(name)
        if column is None or not len(column):
            return None
        finite = np.flatnonzero(np.isfinite(column[-512:]))
        return float(column[-512:][finite[-1]]) if len(finite) else None


class Table:
    """Rows by step, with room to grow; of several rows of one step the last counts, as in loggers.read_metrics."""

    def __init__(self) -> None:
        self._count = 0
        self._steps = np.empty(0, np.int64)
        self._times = np.empty(0)
        self._columns: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        return self._count

    @property
    def held_bytes(self) -> int:
        """Bytes of memory of its arrays."""
        return self._steps.nbytes * (2 + len(self._columns))

    @property
    def last_step(self) -> int | None:
        return int(self._steps[self._count - 1]) if self._count else None

    def view(self) -> View:
        """The rows as they are now, without a copy."""
        n = self._count
        return View(self._steps[:n], self._times[:n], {name: c[:n] for name, c in self._columns.items()})

    def append(self, rows: Rows, to_come: float = 0.0) -> None:
        """Adds rows that were written after all others; `to_come`: how many times as many are still to be read."""
        if not len(rows):
            return
        last = self.last_step
        if len(rows) > 1 and not (np.diff(rows.steps) > 0).all():
            rows = _newest(rows)
        if last is not None and rows.steps[0] <= last:
            self._insert(rows)
            return
        self._reserve(len(rows), rows.columns, int(len(rows) * to_come * 1.05))
        self._write(self._count, rows)
        self._count += len(rows)

    def truncate(self, step: int) -> None:
        """Drops the rows after a step."""
        self._count = int(np.searchsorted(self._steps[: self._count], step, side="right"))

    def coarsen(self, older: int, newest: int) -> None:
        """Keeps the newest rows, and so many of those before them at most, evenly spaced."""
        before = max(0, self._count - newest)
        every = max(1, -(-before // older))
        retained = np.append(np.arange(0, before, every), np.arange(before, self._count))
        self._steps, self._times = self._steps[retained], self._times[retained]
        self._columns = {name: column[retained] for name, column in self._columns.items()}
        self._count = len(retained)

    def _insert(self, rows: Rows) -> None:
        """Adds rows of steps that are not all new: only those from the first of them on are moved."""
        begin = int(np.searchsorted(self._steps[: self._count], rows.steps[0]))
        view = self.view()
        tail = Rows(view.steps[begin:], view.times[begin:], {name: c[begin:] for name, c in view.columns.items()})
        merged = _newest(joined([tail, rows]))
        self._count = begin
        self._reserve(len(merged), merged.columns)
        self._write(begin, merged)
        self._count = begin + len(merged)

    def _reserve(self, more: int, names: Mapping[str, np.ndarray], to_come: int = 0) -> None:
        needed, capacity = self._count + more, len(self._steps)
        if needed > capacity:
            capacity = max(_LEAST_CAPACITY, needed + (to_come or needed // 4))
            self._steps = self._grown(self._steps, capacity)
            self._times = self._grown(self._times, capacity)
            self._columns = {name: self._grown(column, capacity) for name, column in self._columns.items()}
        for name in names:
            if name not in self._columns and len(self._columns) < MOST_METRICS:
                column = np.empty(capacity)
                column[: self._count] = MISSING
                self._columns = {**self._columns, name: column}

    def _grown(self, old: np.ndarray, capacity: int) -> np.ndarray:
        new = np.empty(capacity, old.dtype)
        new[: self._count] = old[: self._count]
        return new

    def _write(self, at: int, rows: Rows) -> None:
        end = at + len(rows)
        self._steps[at:end], self._times[at:end] = rows.steps, rows.times
        for name, column in self._columns.items():
            column[at:end] = rows.columns.get(name, MISSING)


def _newest(rows: Rows) -> Rows:
    """The rows sorted by step, the last one of each."""
    order = np.argsort(rows.steps, kind="stable")
    steps = rows.steps[order]
    order = order[np.append(steps[1:] != steps[:-1], True)]
    return Rows(rows.steps[order], rows.times[order], {name: column[order] for name, column in rows.columns.items()})
