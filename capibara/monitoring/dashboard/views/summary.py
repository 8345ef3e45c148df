"""A run in a few figures, its metrics and events, and where its time went."""

from __future__ import annotations

import numpy as np

from capibara.monitoring.dashboard.views.consensus import exchange_of
from capibara.monitoring.dashboard.views.names import Json, best_of, clean, finite, unit_of
from capibara.monitoring.metrics_file.goodput import CATEGORIES
from capibara.monitoring.reading.parsing import Record
from capibara.monitoring.reading.run import Limits, Run, Status, start_value
from capibara.monitoring.reading.tables import View

_SPARK_POINTS = 60
_SHOWN_EVENTS = 200
_RECENT_STEPS = 50
_NUMBERS = (
    *("step", "total_steps", "eval_loss", "perplexity", "eta_s", "goodput", "started", "updated", "device_kind"),
    *("device_count", "param_count", "tokens"),
)
_TRAIN = ("loss", "tokens_per_s", "mfu", "grad_norm", "learning_rate", "step_s", "consensus_score")


def summary(run: Run, limits: Limits, alerts: int) -> dict[str, Json]:
    """A row of the table of runs.

    Args:
      run: the run.
      limits: when it counts as stalled.
      alerts: how many are active.
    """
    views = run.views()
    train, evaluation = views.get("train"), views.get("eval")
    figures = {name: None if train is None else train.last(name) for name in _TRAIN}
    status = run.status(limits)
    goodput = run.goodput()
    step, total = run.step, start_value(run, "total_steps")
    tokens_per_step = start_value(run, "tokens_per_step")
    return {
        "id": run.id,
        "name": clean(run.name),
        "path": clean(run.folder),
        "status": str(status),
        "loading": run.is_loading,
        "share_read": round(run.share_read * (run.position / run.size if run.size else 1.0), 3),
        "fault": run.fault,
        "step": step,
        "total_steps": total,
        "eval_loss": None if evaluation is None else evaluation.last("loss"),
        "perplexity": None if evaluation is None else evaluation.last("perplexity"),
        "eta_s": _eta_s(train, step, total) if status is Status.RUNNING else None,
        "goodput": round(goodput["productive"] / goodput["total"], 4) if goodput.get("total", 0.0) > 0 else None,
        "started": run.began_s,
        "updated": run.newest_s(),
        "starts": run.attempts.starts,
        "device_kind": clean(run.start.get("device_kind")),
        "device_count": start_value(run, "device_count"),
        "param_count": start_value(run, "param_count"),
        "tokens": None if step is None or tokens_per_step is None else step * tokens_per_step,
        "alerts": alerts,
        "spark": _spark(train),
        **{name: finite(value) for name, value in figures.items()},
    }


def unreadable(run: Run, fault: str) -> dict[str, Json]:
    """The row of a run whose lines make no sense."""
    row: dict[str, Json] = dict.fromkeys((*_NUMBERS, *_TRAIN))
    texts = {"id": run.id, "name": clean(run.name), "path": clean(run.folder), "status": str(Status.FAILED)}
    return {**row, **texts, "loading": False, "share_read": 1.0, "fault": fault, "starts": 0, "alerts": 0, "spark": []}


def details(run: Run, limits: Limits, alerts: int) -> dict[str, Json]:
    """A run's figures, the list of its metrics and its newest events."""
    views = run.views()
    events = list(run.events)[-_SHOWN_EVENTS:]
    train = views.get("train")
    names = set() if train is None else set(train.columns)
    facts = clean(run.facts)
    tabs: dict[str, Json] = {
        "nodes": "consensus_score" in names or exchange_of(run) is not None,
        "experts": any(name.startswith("expert_load/") for name in names),
        "samples": bool(run.samples),
        "system": "system" in views,
    }
    groups: dict[str, Json] = {
        kind: [_metric(kind, name, view) for name in view.columns] for kind, view in views.items()
    }
    return {
        **summary(run, limits, alerts),
        "metrics": groups,
        "events": [clean(_without_kind(event)) for event in events],
        "facts": facts,
        "tabs": tabs,
        "start": clean(_without_kind(run.start)),
    }


def goodput(run: Run) -> dict[str, Json]:
    """Where the run's time went, the largest part first."""
    spent = run.goodput()
    total = spent.get("total", 0.0)
    if total <= 0:
        return {"total_s": None, "goodput": None, "parts": [], "unavailable": "the run has logged no start yet"}
    parts = sorted(((name, spent[name]) for name in CATEGORIES), key=lambda part: -part[1])
    rows: list[Json] = [
        {"name": name.replace("_", " "), "seconds": round(seconds, 3), "share": round(seconds / total, 5)}
        for name, seconds in parts
        if seconds > 0
    ]
    return {"total_s": round(total, 3), "goodput": spent["productive"] / total, "parts": rows, "unavailable": None}


def _without_kind(record: Record) -> Record:
    return {name: value for name, value in record.items() if name != "kind"}


def _metric(kind: str, name: str, view: View) -> dict[str, Json]:
    column = view.columns[name]
    there = np.flatnonzero(~np.isnan(column))
    ends = (int(view.steps[there[0]]), int(view.steps[there[-1]])) if len(there) else (None, None)
    return {
        "name": f"{kind}/{name}",
        "count": len(there),
        "first": ends[0],
        "last": ends[1],
        "value": view.last(name),
        "unit": unit_of(name),
        "best": best_of(name),
    }


def _spark(train: View | None) -> list[Json]:
    column = None if train is None else train.columns.get("loss")
    if column is None:
        return []
    finite_rows = column[np.isfinite(column)] if len(column) < 10_000 else column[:: len(column) // 5_000]
    finite_rows = finite_rows[np.isfinite(finite_rows)]
    chosen = np.unique(np.linspace(0, max(0, len(finite_rows) - 1), _SPARK_POINTS).astype(int))
    return [float(f"{value:.5g}") for value in finite_rows[chosen]] if len(finite_rows) else []


def _eta_s(train: View | None, step: int | None, total: float | None) -> float | None:
    """Seconds to the last step, by the time of the newest steps with all pauses between them."""
    if train is None or step is None or total is None or len(train) < 2:
        return None
    steps, times = train.steps[-_RECENT_STEPS:], train.times[-_RECENT_STEPS:]
    if not np.isfinite(times).all() or steps[-1] <= steps[0]:
        return None
    return finite(max(0.0, float((times[-1] - times[0]) / (steps[-1] - steps[0])) * (total - step)))
