"""What a report says of a run: figures, evaluations, samples, time and cost, read from its folder."""

from __future__ import annotations

import dataclasses
import functools
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
from capibara.monitoring.progress import printable
from capibara.monitoring.trackers.loggers import all_records, kept_of, metrics_path
from capibara.monitoring.trackers.redaction import redact
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

    @functools.cached_property
    def _of_kind(self) -> dict[str, list[Record]]:
        found: dict[str, list[Record]] = {}
        for record in self.records:
            found.setdefault(record["kind"], []).append(record)
        return found

    def points(self, kind: str, name: str) -> tuple[list[int], list[float]]:
        """Steps and finite values of a metric; kind: "train", "eval" or "system"."""
        found = [(r["step"], r[name]) for r in self._of_kind.get(kind, ()) if _finite(r.get(name))]
        return [step for step, _ in found], [value for _, value in found]

    def metrics(self, kind: str) -> list[str]:
        """The names of a kind's metrics, in the order in which they were first logged."""
        names = {name: None for r in self._of_kind.get(kind, ()) for name, value in r.items() if _finite(value)}
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
        found = [r for r in self._of_kind.get("eval", ()) if _finite(r.get("loss"))]
        return min(found, key=lambda r: r["loss"], default=None)

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

    @property
    def samples(self) -> list[Record]:
        """The newest sample texts, cut to a length that can be read."""
        found = self._of_kind.get("sample", [])[-_SAMPLES:]
        texts = ("prompt", "text")
        return [
            {"step": r["step"], **{name: redact(r.get(name, "")[:_SAMPLE_CHARACTERS]) for name in texts}}
            for r in reversed(found)
        ]


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
    since = max(number for number, r in enumerate(everything) if r is starts[-1])
    ends = [r for r in everything[since:] if r["kind"] == "event" and r.get("event") == "end"]
    return RunFacts(
        name=printable(os.path.basename(os.path.normpath(folder))),
        path=folder,
        records=kept_of(everything),
        config=_config(folder),
        about=starts[-1],
        ended=str(ends[-1].get("reason")) if ends else None,
        seconds=goodput.account(everything),
        starts=len(starts),
        lineage=_lineage(folder),
    )


def distinct(runs: Sequence[RunFacts]) -> list[RunFacts]:
    """The runs with names that differ: of equal ones as much of the path as tells them apart, or a number."""
    found: list[RunFacts] = []
    for run in runs:
        alike = {tuple(os.path.normpath(other.path).split(os.sep)) for other in runs if other.name == run.name}
        parts, count = os.path.normpath(run.path).split(os.sep), 1
        while count < len(parts) and len({one[-count:] for one in alike}) < len(alike):
            count += 1
        name = printable("/".join(parts[-count:])) if len(alike) > 1 else run.name
        taken = {one.name for one in found}
        numbered = (f"{name} ({number})" for number in range(2, len(runs) + 2))
        found.append(dataclasses.replace(run, name=next(one for one in (name, *numbered) if one not in taken)))
    return found


def _config(folder: str) -> str:
    path = os.path.join(folder, run_manifest.CONFIG)
    try:
        return stores.of(path).read(path, limits.SMALL_BYTES).decode("utf-8", errors="replace")
    except (OSError, UserError, limits.Refused):
        return ""


def _lineage(folder: str) -> list[str]:
    try:
        return redact(Chain(Check.SIZES).of(folder).text()).splitlines()
    except Exception:  # whatever the manifests of an untrusted folder lead to
        return []


def _number(value: object) -> float | None:
    return value if isinstance(value, (int, float)) and _finite(value) else None


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
