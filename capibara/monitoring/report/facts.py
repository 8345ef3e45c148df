"""What a report says of a run: figures, evaluations, samples, time and cost, read from its folder."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from capibara.builders.lineage.chain import Chain
from capibara.builders.lineage.nodes import Check
from capibara.checkpoints import run_manifest
from capibara.core import limits
from capibara.core.types import UserError
from capibara.monitoring import goodput
from capibara.monitoring.trackers.loggers import all_records, metrics_path, read_metrics
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
      records: its metrics.jsonl as if it had never been interrupted.
      config: the operative Gin configuration; empty: there is none.
      about: the values of its last start (param_count, device_count, device_kind, total_steps, tokens_per_step).
      ended: the reason of its last end; None: it has not ended, or was killed.
      seconds: by cause, and "total" (goodput.account).
      starts: number of starts.
      lineage: text lines on where its data comes from.
    """

    name: str
    path: str
    records: Sequence[Record]
    config: str
    about: Record
    ended: str | None
    seconds: Mapping[str, float]
    starts: int
    lineage: Sequence[str]

    def points(self, kind: str, name: str) -> tuple[list[int], list[float]]:
        """Steps and finite values of a metric; kind: "train", "eval" or "system"."""
        found = [(r["step"], r[name]) for r in self.records if r["kind"] == kind and _finite(r.get(name))]
        return [step for step, _ in found], [value for _, value in found]

    def metrics(self, kind: str) -> list[str]:
        """The names of a kind's metrics, in the order in which they were first logged."""
        names = {name: None for r in self.records if r["kind"] == kind for name, value in r.items() if _finite(value)}
        return [name for name in names if name not in ("step", "time")]

    def last(self, kind: str, name: str) -> float | None:
        """The last finite value of a metric."""
        _, values = self.points(kind, name)
        return values[-1] if values else None

    @property
    def step(self) -> int:
        """The last step that was logged."""
        return max((r["step"] for r in self.records), default=0)

    @property
    def best(self) -> Record | None:
        """The evaluation with the lowest loss."""
        found = [r for r in self.records if r["kind"] == "eval" and _finite(r.get("loss"))]
        return min(found, key=lambda r: r["loss"], default=None)

    @property
    def goodput(self) -> float | None:
        """The share of the time that was spent on steps that count."""
        return self.seconds["productive"] / self.seconds["total"] if self.seconds.get("total") else None

    @property
    def tokens(self) -> float | None:
        """Positions that the run has trained on, padding included."""
        of_step = _number(self.about.get("tokens_per_step"))
        return None if of_step is None else of_step * self.step

    @property
    def device_hours(self) -> float | None:
        """Hours of all its devices together, from the start of each process to its last record."""
        count, total = _number(self.about.get("device_count")), self.seconds.get("total")
        if count is None or total is None:
            return None
        return count * (total - self.seconds.get("down", 0.0)) / 3600

    @property
    def samples(self) -> list[Record]:
        """The newest sample texts, cut to a length that can be read."""
        found = [r for r in self.records if r["kind"] == "sample"][-_SAMPLES:]
        return [{**r, "text": str(r.get("text", ""))[:_SAMPLE_CHARACTERS]} for r in reversed(found)]


def read(folder: str) -> RunFacts:
    """Reads a run folder, on this machine or in a bucket.

    Raises:
      UserError: it is no run folder.
    """
    path = metrics_path(folder)
    everything = all_records(path)
    starts = [r for r in everything if r["kind"] == "event" and r.get("event") == "start"]
    if not starts:
        raise UserError(f"{path} has no start of a run: name a run folder that `capibara train` has written")
    since = everything.index(starts[-1])
    ends = [r for r in everything[since:] if r["kind"] == "event" and r.get("event") == "end"]
    return RunFacts(
        name=os.path.basename(os.path.normpath(folder)),
        path=folder,
        records=read_metrics(path),
        config=_config(folder),
        about=starts[-1],
        ended=str(ends[-1].get("reason")) if ends else None,
        seconds=goodput.account(everything),
        starts=len(starts),
        lineage=_lineage(folder),
    )


def _config(folder: str) -> str:
    path = os.path.join(folder, run_manifest.CONFIG)
    try:
        return stores.of(path).read(path, limits.SMALL_BYTES).decode("utf-8", errors="replace")
    except (FileNotFoundError, limits.Refused):
        return ""


def _lineage(folder: str) -> list[str]:
    try:
        return Chain(Check.SIZES).of(folder).text().splitlines()
    except (UserError, OSError):
        return []


def _number(value: object) -> float | None:
    return value if isinstance(value, (int, float)) and _finite(value) else None


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
