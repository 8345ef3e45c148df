"""The plan's predictions beside what the run measures."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from capibara.monitoring.dashboard.views.names import Json
from capibara.monitoring.reading.run import Run
from capibara.monitoring.reading.tables import View

_RECENT = 200  # training lines


def compared(run: Run, answer: Mapping[str, Json]) -> dict[str, Json]:
    """Rows of predictions and measurements.

    Args:
      run: the run.
      answer: of the planner: "predicted" (step_s, tokens_per_s, mfu, peak_bytes) and "plan"; or "unavailable".
    """
    views = run.views()
    train, system = views.get("train"), views.get("system")
    result = answer.get("predicted")
    predicted = result if isinstance(result, dict) else {}
    measured = {name: _median(train, name) for name in ("step_s", "tokens_per_s", "mfu")}
    measured["peak_bytes"] = _peak(system)
    rows: list[Json] = []
    for name, title, unit in (
        ("step_s", "step time", "s"),
        ("tokens_per_s", "tokens per second", "tokens/s"),
        ("mfu", "model FLOPs utilisation", "share"),
        ("peak_bytes", "peak device memory", "bytes"),
    ):
        expected, real = predicted.get(name), measured[name]
        is_known = isinstance(expected, (int, float)) and bool(expected)
        ratio = real / expected if is_known and real is not None and isinstance(expected, (int, float)) else None
        note = "" if real is not None else "not measured on this device"
        rows.append(
            {"name": title, "unit": unit, "predicted": expected, "measured": real, "ratio": ratio, "note": note}
        )
    return {"rows": rows, "plan": answer.get("plan"), "unavailable": answer.get("unavailable")}


def _median(train: View | None, name: str) -> float | None:
    """The median of the newest lines; the first ones hold compilation."""
    column = None if train is None else train.columns.get(name)
    if column is None:
        return None
    recent = column[-_RECENT:]
    recent = recent[np.isfinite(recent)]
    return float(np.median(recent)) if len(recent) else None


def _peak(system: View | None) -> float | None:
    column = None if system is None else system.columns.get("device_memory_peak_bytes")
    if column is None:
        return None
    finite = column[np.isfinite(column)]
    return float(finite.max()) if len(finite) else None
