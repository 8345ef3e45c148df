"""Lines of charts: metrics over steps, time or tokens, thinned out on the server."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterator, Sequence

import numpy as np

from capibara.monitoring.dashboard.views.names import Json, split, unit_of
from capibara.monitoring.reading.run import Run, start_value
from capibara.monitoring.reading.tables import View
from capibara.monitoring.reading.thinning import smoothed, thinned

_SHOWN_NOT_FINITE = 200
_CSV_ROWS = 5_000  # of one piece of an export
_FORMULAS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")  # also as wide characters


class Axis(enum.StrEnum):
    """What the points are drawn over."""

    STEP = "step"
    TIME = "time"
    RELATIVE = "relative"
    TOKENS = "tokens"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Query:
    """What is drawn.

    Attributes:
      metrics: such as "train/loss".
      axis: over what.
      low, high: the range in units of the axis; None: all.
      points: about the most points of a line.
      smooth: weight of the past in the moving average; 0: none.
    """

    metrics: tuple[str, ...]
    axis: Axis = Axis.STEP
    low: float | None = None
    high: float | None = None
    points: int = 1200
    smooth: float = 0.0


def series(runs: Sequence[Run], query: Query) -> dict[str, Json]:
    """The lines of several runs; runs and metrics that do not exist are omitted."""
    lines: list[Json] = []
    for run in runs:
        views = run.views()
        for metric in query.metrics:
            kind, name = split(metric)
            view = views.get(kind)
            if view is not None and name in view.columns:
                lines.append({"run": run.id, "metric": metric, "unit": unit_of(name), **_line(run, view, name, query)})
    return {"x": str(query.axis), "series": lines}


def _line(run: Run, view: View, name: str, query: Query) -> dict[str, Json]:
    x, y = _points(run, view, name, query.axis)
    whole = (float(x[0]), float(x[-1])) if len(x) else ()
    soft = None
    if query.smooth > 0:
        finite = np.isfinite(y)
        soft = np.full(len(y), np.nan)
        soft[finite] = smoothed(y[finite], query.smooth)
    begin, end = 0, len(x)
    if query.low is not None or query.high is not None:
        ordered = x if len(x) < 2 or (np.diff(x) >= 0).all() else np.maximum.accumulate(x)
        begin = 0 if query.low is None else int(np.searchsorted(ordered, query.low, side="left"))
        end = len(x) if query.high is None else int(np.searchsorted(ordered, query.high, side="right"))
    x, y = x[begin:end], y[begin:end]
    finite = np.isfinite(y)
    lost = x[~finite]
    result = thinned(x[finite], y[finite], query.points)
    shown: list[Json] | None = None if soft is None else _numbers(soft[begin:end][finite][result.indices])
    return {
        "x": _numbers(result.x),
        "y": _numbers(result.y),
        "smooth": shown,
        "exact": result.is_exact and not run.is_coarse,
        "count": len(x),
        "range": [*whole],
        "nonfinite": _numbers(lost[:: max(1, -(-len(lost) // _SHOWN_NOT_FINITE))]),
    }


def _points(run: Run, view: View, name: str, axis: Axis) -> tuple[np.ndarray, np.ndarray]:
    """The x and y [n] of the rows that have the metric."""
    column = view.columns[name]
    there = ~np.isnan(column)
    x: np.ndarray = view.steps.astype(float)
    if axis is Axis.TOKENS:
        x = x * (start_value(run, "tokens_per_step") or math.nan)
    elif axis is not Axis.STEP:
        x = view.times - (0.0 if axis is Axis.TIME else run.began_s or 0.0)
    there &= np.isfinite(x)
    return (x, column) if there.all() else (x[there], column[there])


def _numbers(values: np.ndarray) -> list[Json]:
    if len(values) and (values == np.trunc(values)).all() and np.abs(values).max() < 2**53:
        return values.astype(np.int64).tolist()
    return values.tolist()


def csv(runs: Sequence[Run], query: Query) -> Iterator[str]:
    """Every point of the lines as comma-separated values: run, metric, step, time, value (empty: not finite)."""
    yield "run,metric,step,time,value\r\n"
    for run in runs:
        views = run.views()
        for metric in query.metrics:
            kind, name = split(metric)
            view = views.get(kind)
            if view is None or name not in view.columns:
                continue
            low = 0 if query.low is None else int(np.searchsorted(view.steps, query.low, side="left"))
            high = len(view) if query.high is None else int(np.searchsorted(view.steps, query.high, side="right"))
            head = f"{_cell(run.name)},{_cell(metric)}"
            for begin in range(low, high, _CSV_ROWS):
                yield "".join(_csv_rows(head, view, name, begin, min(high, begin + _CSV_ROWS)))


def _csv_rows(head: str, view: View, name: str, begin: int, end: int) -> Iterator[str]:
    rows = zip(view.steps[begin:end].tolist(), view.times[begin:end].tolist(), view.columns[name][begin:end].tolist())
    for step, time_s, value in rows:
        if not math.isnan(value):
            yield (
                f"{head},{step},{time_s!r},{value!r}\r\n" if math.isfinite(value) else f"{head},{step},{time_s!r},\r\n"
            )


def _cell(text: str) -> str:
    """A quoted cell; a spreadsheet must not take a run's name for a formula."""
    text = "".join(sign if sign.isprintable() else " " for sign in text.encode("utf-8", "replace").decode())
    text = f"'{text}" if text.lstrip().startswith(_FORMULAS) else text
    return '"' + text.replace('"', '""') + '"'
