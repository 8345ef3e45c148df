"""Rules by which runs are watched: loss spikes, numbers that are not finite, stalls, low goodput, full disks, rejected nodes."""

from __future__ import annotations

import dataclasses
import enum
import re
import time
from collections.abc import Iterator, Mapping

import numpy as np

from capibara.monitoring.dashboard.views.names import Json
from capibara.monitoring.reading.run import Limits, Run, Status
from capibara.monitoring.reading.tables import View

_LEAST_LOSSES = 16  # before a loss is compared with them
_REJECTED_ROUNDS = 3  # logged rounds in a row without a node
_MOST_OF_A_KIND = 50  # alerts of one run that are kept
_ACCEPTED = re.compile(r"(node_\d+)/accepted")
_NEWEST = 20_000  # lines that are looked at
_GIB = 1 << 30


class Kind(enum.StrEnum):
    """What an alert is about."""

    SPIKE = "spike"
    NAN = "nan"
    STALL = "stall"
    GOODPUT = "goodput"
    DISK = "disk"
    REJECTED = "rejected"
    MEMORY = "memory"


class Severity(enum.StrEnum):
    """How bad it is."""

    WARNING = "warning"
    SERIOUS = "serious"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """When an alert is raised.

    Attributes:
      spike_sigmas: deviations of a loss above the mean of the last `spike_window` logged ones.
      spike_window: logged losses.
      low_goodput: share of the time spent on steps that count, below which a run is slow.
      goodput_after_s: seconds of a run before its goodput is judged.
      disk_free_gib: free space of a run folder's disk.
      quiet: when a silent run counts as stalled.
    """

    spike_sigmas: float = 6.0
    spike_window: int = 128
    low_goodput: float = 0.5
    goodput_after_s: float = 900.0
    disk_free_gib: float = 10.0
    quiet: Limits = Limits()

    def as_json(self) -> dict[str, Json]:
        """The thresholds for viewers."""
        conditions = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "quiet"
        }
        return {**conditions, "quiet_s": self.quiet.quiet_s, "quiet_train_s": self.quiet.quiet_train_s}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """Something wrong with a run now, or at a step.

    Attributes:
      kind, severity: of the alert.
      key: identifies it among the run's alerts of its kind.
      step: of the run; None: unknown.
      time_s: when it happened: seconds since 1970.
      text: one sentence.
      is_over: whether it has ended.
    """

    kind: Kind
    severity: Severity
    key: str
    step: int | None
    time_s: float
    text: str
    is_over: bool = False


def check(run: Run, rules: Rules, now_s: float | None = None) -> list[Found]:
    """What is wrong with a run by the rules, the oldest first of each kind."""
    now_s = time.time() if now_s is None else now_s
    views = run.views()
    result: list[Found] = []
    if (train := views.get("train")) is not None and len(train):
        train = _newest(train)
        for rule in (_spikes(train, rules), _not_finite(train), _rejected(train)):
            result += list(rule)[-_MOST_OF_A_KIND:]
    if (system := views.get("system")) is not None and len(system):
        result += _disk(system, rules)
    result += _state(run, rules, now_s)
    return result


def _newest(view: View) -> View:
    """The newest rows."""
    newest = slice(max(0, len(view) - _NEWEST), None)
    return View(view.steps[newest], view.times[newest], {name: item[newest] for name, item in view.columns.items()})


def _spikes(train: View, rules: Rules) -> Iterator[Found]:
    """Losses far above those before them, each with the run of high losses that follows it."""
    column = train.columns.get("loss")
    if column is None:
        return
    rows = np.flatnonzero(np.isfinite(column))
    loss = column[rows]
    high = np.flatnonzero(_far_above(loss, rules.spike_window, rules.spike_sigmas))
    last = -rules.spike_window
    for at in high.tolist():
        if at - last > rules.spike_window // 4:
            row = int(rows[at])
            before = loss[max(0, at - rules.spike_window) : at]
            deviations = (loss[at] - before.mean()) / max(float(before.std()), 1e-12)
            text = f"loss {loss[at]:.4g} at step {train.steps[row]}, {deviations:.0f} deviations above the last {len(before)}"
            is_over = bool(at + rules.spike_window // 4 < len(loss))
            yield _at(train, row, Kind.SPIKE, Severity.WARNING, text, is_over=is_over)
        last = at


def _far_above(loss: np.ndarray, window: int, sigmas: float) -> np.ndarray:
    """Which losses are more than `sigmas` deviations above the mean of the `window` losses before them."""
    count = len(loss)
    if count <= _LEAST_LOSSES:
        return np.zeros(count, bool)
    centre = float(np.median(loss))  # sums of squares of what is left lose no digits
    sums, squares = (np.concatenate([[0.0], np.cumsum((loss - centre) ** power)]) for power in (1, 2))
    begin = np.maximum(0, np.arange(count) - window)
    number = np.arange(count) - begin
    divisor = np.maximum(number, 1)
    mean = (sums[:-1] - sums[begin]) / divisor
    variance = np.maximum(0.0, (squares[:-1] - squares[begin]) / divisor - mean**2)
    least = 1e-3 * np.maximum(np.abs(mean + centre), 1e-3)  # losses that hardly vary: no spike of a thousandth
    return (number >= _LEAST_LOSSES) & (loss - centre - mean > sigmas * np.maximum(np.sqrt(variance), least))


def _not_finite(train: View) -> Iterator[Found]:
    """Losses that are not finite, and skipped updates; one alert for each stretch of them."""
    loss, skipped = train.columns.get("loss"), train.columns.get("skipped")
    bad = np.zeros(len(train), bool)
    if loss is not None:
        bad |= np.isinf(loss)
    if skipped is not None:
        bad |= np.nan_to_num(skipped, nan=0.0, posinf=0.0) > 0
    rows = np.flatnonzero(bad)
    last = -2
    for row in rows.tolist():
        if row > last + 1:
            is_loss = loss is not None and bool(np.isinf(loss[row]))
            fault = "the loss is not finite" if is_loss else "updates were skipped, their numbers not finite"
            is_over = bool(row + 1 < len(train) and not bad[-1])
            yield _at(train, row, Kind.NAN, Severity.SERIOUS, f"{fault} at step {train.steps[row]}", is_over=is_over)
        last = row


def _rejected(train: View) -> Iterator[Found]:
    """Nodes that had no part in the last rounds."""
    recent = slice(max(0, len(train) - _REJECTED_ROUNDS), None)
    if len(train) < _REJECTED_ROUNDS:
        return
    for name, column in train.columns.items():
        if (match := _ACCEPTED.fullmatch(name)) and (column[recent] == 0).all():
            drawn = train.columns.get(f"{match[1]}/drawn")
            if drawn is not None and (drawn[recent] == 0).any():
                continue
            text = f"{match[1]} has had no part in the last {_REJECTED_ROUNDS} logged rounds, at step {train.steps[-1]}"
            yield Found(
                kind=Kind.REJECTED, severity=Severity.WARNING, key=match[1], step=int(train.steps[-1]),
                time_s=float(train.times[-1]), text=text,
            )  # fmt: skip


def _disk(system: View, rules: Rules) -> Iterator[Found]:
    free_bytes = system.last("disk_free_bytes")
    if free_bytes is not None and free_bytes < rules.disk_free_gib * _GIB:
        text = f"{free_bytes / _GIB:.1f} GiB are free on the run folder's disk: less than {rules.disk_free_gib:g}"
        yield Found(
            kind=Kind.DISK, severity=Severity.SERIOUS, key="", step=int(system.steps[-1]),
            time_s=float(system.times[-1]), text=text,
        )  # fmt: skip


def _state(run: Run, rules: Rules, now_s: float) -> Iterator[Found]:
    """Stalls and low goodput of a run that has not ended."""
    status = run.status(rules.quiet, now_s)
    step = run.step
    if status is Status.STALLED and (newest_s := run.newest_s()) is not None:
        text = f"nothing was trained for {_minutes(now_s - (run.newest_s('train') or newest_s))}, at step {step}"
        yield Found(kind=Kind.STALL, severity=Severity.SERIOUS, key="", step=step, time_s=newest_s, text=text)
    spent: Mapping[str, float] = run.goodput() if status in (Status.RUNNING, Status.STALLED) else {}
    total_s = spent.get("total", 0.0)
    if total_s > rules.goodput_after_s and spent["productive"] / total_s < rules.low_goodput:
        share = spent["productive"] / total_s
        rest = max((name for name in spent if name not in ("productive", "total")), key=lambda name: spent[name])
        text = f"goodput {share:.0%}, below {rules.low_goodput:.0%}; most of the rest: {rest.replace('_', ' ')}"
        when_s = run.newest_s() or now_s
        yield Found(kind=Kind.GOODPUT, severity=Severity.WARNING, key="", step=step, time_s=when_s, text=text)


def _at(view: View, row: int, kind: Kind, severity: Severity, text: str, *, is_over: bool) -> Found:
    step = int(view.steps[row])
    when_s = float(view.times[row])
    return Found(kind=kind, severity=severity, key=str(step), step=step, time_s=when_s, text=text, is_over=is_over)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} s"
