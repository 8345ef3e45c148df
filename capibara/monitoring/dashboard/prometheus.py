"""The runs' newest figures in Prometheus' text format."""

from __future__ import annotations

import math
from collections.abc import Iterator

from capibara.monitoring.dashboard.state import Dashboard
from capibara.monitoring.dashboard.views.names import Json
from capibara.monitoring.reading.run import Run

_RUN_GAUGES = {
    "step": "Last logged step.",
    "total_steps": "Step at which the run ends.",
    "loss": "Training loss.",
    "eval_loss": "Loss of the last evaluation.",
    "tokens_per_s": "Training tokens per second.",
    "mfu": "Model FLOPs utilisation, 0 to 1.",
    "goodput": "Share of the time spent on steps that count, 0 to 1.",
    "grad_norm": "Norm of the gradient.",
    "learning_rate": "Learning rate.",
    "step_s": "Seconds of a step.",
    "updated": "Time of the newest line, in seconds since 1970.",
    "alerts": "Active alerts.",
}
_SYSTEM = (
    "host_memory_bytes",
    "device_memory_peak_bytes",
    "disk_free_bytes",
    "tensorcore_util_percent",
    "duty_cycle_percent",
)
_MOST_RUNS = 1_000


def page(dashboard: Dashboard) -> str:
    """All figures."""
    runs = [(run, dashboard.summary(run)) for run in dashboard.runs[:_MOST_RUNS]]
    lines = []
    for name, about in _RUN_GAUGES.items():
        lines += _head(f"capibara_run_{name}", about)
        lines += [line for run, row in runs for line in _value(f"capibara_run_{name}", run, row[name])]
    lines += _head("capibara_run_status", "1 for the run's status.")
    lines += [f'capibara_run_status{{{_labels(run)},status="{_label(str(row["status"]))}"}} 1' for run, row in runs]
    for name in _SYSTEM:
        lines += _head(f"capibara_run_{name}", "See metrics.jsonl.")
        lines += [
            line for run, _ in runs for line in _value(f"capibara_run_{name}", run, run.view("system").last(name))
        ]
    gauges = {
        "viewers": ("Connected viewers.", dashboard.hub.viewers),
        "runs": ("Runs that were found.", len(dashboard.runs)),
        "held_bytes": ("Memory of all metrics.", sum(run.held_bytes for run in dashboard.runs)),
        "webhooks_failed": ("Alerts that could not be sent.", dashboard.webhooks.failed),
    }
    for name, (about, value) in gauges.items():
        lines += [*_head(f"capibara_dashboard_{name}", about), f"capibara_dashboard_{name} {value}"]
    return "\n".join(lines) + "\n"


def _head(name: str, about: str) -> list[str]:
    return [f"# HELP {name} {about}", f"# TYPE {name} gauge"]


def _value(name: str, run: Run, value: Json) -> Iterator[str]:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        yield f"{name}{{{_labels(run)}}} {float(value)!r}"


def _labels(run: Run) -> str:
    """A run's name, and its id: runs below two roots may have the same name, and a series is there once."""
    return f'run="{_label(run.name)}",id="{run.id}"'


def _label(text: str) -> str:
    """A label's value: what ends a line or a quotation in it is escaped."""
    text = text.encode("utf-8", "replace").decode()[:300]
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", " ")
