"""What a report says of a run: figures, evaluations, samples, time and cost, read from its folder."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from capibara.builders.lineage import history
from capibara.builders.lineage.chain import Chain
from capibara.builders.lineage.nodes import Check
from capibara.checkpoints import run_manifest
from capibara.core import limits
from capibara.core.types import UserError
from capibara.monitoring.metrics_file.loggers import AGAIN
from capibara.monitoring.metrics_file.redaction import redact
from capibara.monitoring.reading import parsing
from capibara.monitoring.reading.run import Run
from capibara.monitoring.reading.tables import View
from capibara.monitoring.reading.whole import whole
from capibara.monitoring.summaries.progress import printable
from capibara.storage import stores

_SAMPLES = 6  # of a run, the newest
_SAMPLE_CHARACTERS = 2000
Record = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFacts:
    """A run as a report shows it; None: unknown, never 0.

    Attributes:
      name: the folder's name.
      path: the run folder.
      run: its metrics.jsonl as if it had never been interrupted.
      config: the operative Gin configuration; empty: there is none.
      samples: the newest texts, cut to a length that can be read.
      lineage: text lines on where its data comes from.
      notes: what is wrong with the folder, and what is not shown for that: a line each.
    """

    name: str
    path: str
    run: Run
    config: str
    samples: Sequence[Record]
    lineage: Sequence[str]
    notes: Sequence[str] = ()

    @functools.cached_property
    def _views(self) -> Mapping[str, View]:
        return self.run.views()

    def points(self, kind: str, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and finite values [n] of a metric; kind: "train", "eval" or "system"."""
        return self.run.view(kind).points(name)

    def metrics(self, kind: str) -> list[str]:
        """The names of a kind's metrics that have values, sorted, the loss first."""
        columns = self._views[kind].columns if kind in self._views else {}
        result = [name for name, values in columns.items() if np.isfinite(values).any()]
        return sorted(result, key=lambda name: (name != "loss", name))

    def last(self, kind: str, name: str) -> float | None:
        """The last finite value of a metric."""
        _, values = self.points(kind, name)
        return float(values[-1]) if len(values) else None

    @property
    def about(self) -> Record:
        """The values of its last start (param_count, device_count, device_kind, total_steps, tokens_per_step)."""
        return self.run.start

    @property
    def ended(self) -> str | None:
        """The reason of its last end; None: it has not ended, or was killed."""
        return None if self.run.end is None else str(self.run.end.get("reason"))

    @property
    def starts(self) -> int:
        """How often it was started."""
        return self.run.attempts.starts

    @functools.cached_property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by cause, and "total" (goodput.account)."""
        return self.run.goodput()

    @property
    def step(self) -> int:
        """The last step that was logged."""
        steps = [int(view.steps[-1]) for view in self._views.values() if len(view)]
        steps += [step for step, _ in self.run.samples]
        events = self.run.events
        steps += [event["step"] for event in events if event.get("event") not in AGAIN]
        started = [event["step"] for event in events if event.get("event") in AGAIN]  # all but the last may be void
        return max([*steps, *started[-1:], 0])

    @property
    def best(self) -> Mapping[str, float] | None:
        """The evaluation with the lowest loss: its finite metrics."""
        steps, losses = self.points("eval", "loss")
        if not len(steps):
            return None
        view = self._views["eval"]
        row = int(np.searchsorted(view.steps, steps[losses.argmin()]))
        return {name: float(values[row]) for name, values in view.columns.items() if np.isfinite(values[row])}

    @property
    def goodput(self) -> float | None:
        """The share of the time that was spent on steps that count."""
        return self.seconds["productive"] / self.seconds["total"] if self.seconds.get("total") else None

    @property
    def tokens(self) -> float | None:
        """Positions that the run has trained on, padding included."""
        of_step = _number(self.about.get("tokens_per_step"))
        return None if of_step is None else _number(of_step * self.step)

    @property
    def device_hours(self) -> float | None:
        """Hours of all its devices together, from the start of each process to its last record."""
        count, total = _number(self.about.get("device_count")), self.seconds.get("total")
        if count is None or total is None:
            return None
        return _number(count * (total - self.seconds.get("down", 0.0)) / 3600)


def read(folder: str) -> RunFacts:
    """Reads a run folder, on this machine or in a bucket.

    Raises:
      UserError: it is no run folder.
    """
    run = whole(folder)
    if not run.start:
        raise UserError(f"{run.path} has no start of a run: name a run folder that `capibara train` has written")
    notes: list[str] = []
    _check_metrics(folder, notes)
    config, lineage = _config(folder, notes), _lineage(folder, notes)
    return RunFacts(
        name=printable(run.name),
        path=folder,
        run=run,
        config=config,
        samples=_samples(run),
        lineage=lineage,
        notes=[printable(line) for line in notes],
    )


def _samples(run: Run) -> list[Record]:
    newest = sorted(run.samples.values(), key=lambda sample: (sample.step, sample.start))[-_SAMPLES:]
    lines = [line for sample in reversed(newest) if (line := parsing.line_at(run.path, sample)) is not None]
    texts = ("prompt", "text")
    return [
        {"step": line["step"], **{name: redact(str(line.get(name, ""))[:_SAMPLE_CHARACTERS]) for name in texts}}
        for line in lines
    ]


def distinct(runs: Sequence[RunFacts]) -> list[RunFacts]:
    """The runs with names that differ: of equal ones as much of the path as tells them apart, or a number."""
    result: list[RunFacts] = []
    for run in runs:
        alike = {tuple(os.path.normpath(other.path).split(os.sep)) for other in runs if other.name == run.name}
        parts, count = os.path.normpath(run.path).split(os.sep), 1
        while count < len(parts) and len({item[-count:] for item in alike}) < len(alike):
            count += 1
        name = printable("/".join(parts[-count:])) if len(alike) > 1 else run.name
        taken = {item.name for item in result}
        numbered = (f"{name} ({number})" for number in range(2, len(runs) + 2))
        result.append(dataclasses.replace(run, name=next(item for item in (name, *numbered) if item not in taken)))
    return result


def _check_metrics(folder: str, notes: list[str]) -> None:
    """Notes if metrics.jsonl, or the manifest that has its hash, has changed since the run wrote it."""
    path = run_manifest.folder_of(folder)
    if not stores.of(path).has_local_paths:  # it would be read twice
        return
    try:
        manifest = run_manifest.read(path)
        faults = [] if manifest is None else run_manifest.faults(path, manifest, run_manifest.Role.LOG)
        notes += [line for line in faults if line.startswith(run_manifest.METRICS)]
    except (run_manifest.Corrupted, OSError, UserError) as error:
        notes.append(limits.cause(error, 400))


def _config(folder: str, notes: list[str]) -> str:
    try:
        return run_manifest.config_text(run_manifest.folder_of(folder)) or ""
    except (OSError, UserError) as error:
        notes.append(f"the configuration is left out: {limits.cause(error, 400)}")
        return ""


def _lineage(folder: str, notes: list[str]) -> list[str]:
    try:
        path = run_manifest.folder_of(folder)
        run_manifest.check_own(path, run_manifest.NAME, history.FILE)
        run_manifest.check_own_steps(path)
    except (OSError, UserError) as error:
        notes.append(f"the lineage is left out: {limits.cause(error, 400)}")
        return []
    try:
        return redact(Chain(Check.SIZES).of(folder).text()).splitlines()
    except Exception:  # whatever the manifests of an untrusted folder lead to
        return []


def _number(value: object) -> float | None:
    return value if isinstance(value, (int, float)) and _finite(value) else None


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
