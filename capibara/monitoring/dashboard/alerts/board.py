"""The alerts of all runs: when each began and ended, and which are news."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable

from capibara.monitoring.dashboard.alerts import rules as alert_rules
from capibara.monitoring.dashboard.alerts.rules import Found, Kind, Rules
from capibara.monitoring.dashboard.views.names import Json, clean, finite
from capibara.monitoring.reading.run import Run

_MOST_ALERTS = 2_000
_NEWS_S = 900.0  # an older event, found when a run is opened, is no news
_EVERY_S = 2.0  # between two checks of a run


@dataclasses.dataclass
class Alert:
    """An alert of a run.

    Attributes:
      id: identifies it.
      run_id, run_name: of the run.
      finding: as it was last seen.
      ended_s: when it was over: seconds since 1970; None: it is not.
    """

    id: str
    run_id: str
    run_name: str
    finding: Found
    ended_s: float | None = None

    def as_json(self) -> dict[str, Json]:
        """The alert for viewers and webhooks."""
        return {
            "id": self.id,
            "run": self.run_id,
            "run_name": clean(self.run_name),
            "kind": str(self.finding.kind),
            "severity": str(self.finding.severity),
            "step": self.finding.step,
            "time": finite(self.finding.time_s),
            "active": self.ended_s is None,
            "ended": finite(self.ended_s),
            "text": self.finding.text,
        }


class Board:
    """Keeps the alerts of all runs.

    Args:
      rules: when alerts are raised.
      news: called with each alert that has just begun or ended, in the thread that checks.
    """

    def __init__(self, rules: Rules, news: Callable[[Alert], None] = lambda alert: None):
        self.rules = rules
        self._news, self._lock = news, threading.Lock()
        self._alerts: dict[str, Alert] = {}
        self._checked: dict[str, float] = {}

    def check(self, run: Run, now_s: float | None = None, *, is_due: bool = False) -> None:
        """Checks a run if it was not checked a moment ago; `is_due`: in any case."""
        if run.is_loading:
            return
        moment_s = time.monotonic()
        if not is_due and moment_s - self._checked.get(run.id, -math.inf) < _EVERY_S:
            return
        self._checked[run.id] = moment_s
        now_s = time.time() if now_s is None else now_s
        result = {self._id(run, item): item for item in alert_rules.check(run, self.rules, now_s)}
        news = []
        with self._lock:
            alerts = {name: alert for name, alert in self._alerts.items() if alert.run_id == run.id}
            for name, entry in result.items():
                ended_s = entry.time_s if entry.is_over else None
                previous = alerts.get(name)
                if previous is None:
                    alert = self._alerts[name] = Alert(name, run.id, run.name, entry, ended_s)
                    news += [alert] * (now_s - entry.time_s < _NEWS_S or entry.kind in _LASTING and not entry.is_over)
                elif (previous.ended_s is None) != (ended_s is None) or previous.ended_s is None:
                    news += [previous] * ((previous.ended_s is None) != (ended_s is None))
                    previous.finding, previous.ended_s = entry, None if ended_s is None else previous.ended_s or now_s
            for name, alert in alerts.items():
                if name not in result and alert.ended_s is None:
                    alert.ended_s = now_s  # what happened before a roll-back stays in the list
                    news.append(alert)
            while len(self._alerts) > _MOST_ALERTS:
                del self._alerts[next(iter(self._alerts))]
        for alert in news:
            self._news(alert)

    def forget(self, run_id: str) -> None:
        """Drops the alerts of a run that is gone."""
        with self._lock:
            self._alerts = {name: alert for name, alert in self._alerts.items() if alert.run_id != run_id}
            self._checked.pop(run_id, None)

    def active(self, run_id: str) -> int:
        """How many alerts of a run are active."""
        with self._lock:
            return sum(alert.run_id == run_id and alert.ended_s is None for alert in self._alerts.values())

    def all(self, run_id: str | None = None, *, only_active: bool = False) -> list[Alert]:
        """The alerts of a run, or of all, the newest first."""
        with self._lock:
            chosen = [alert for alert in self._alerts.values() if run_id in (None, alert.run_id)]
        chosen = [alert for alert in chosen if alert.ended_s is None or not only_active]
        return sorted(chosen, key=lambda alert: -alert.finding.time_s)

    def _id(self, run: Run, finding: Found) -> str:
        return f"{run.id}-{finding.kind}-{finding.key}"


# They describe the present, and end when they are no longer found; the others happened at a step.
_LASTING = (Kind.STALL, Kind.GOODPUT, Kind.DISK, Kind.REJECTED, Kind.MEMORY)
