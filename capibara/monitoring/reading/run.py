"""One run folder: its metrics as far as they have been read, and what they say of the run's state."""

from __future__ import annotations

import collections
import dataclasses
import enum
import hashlib
import math
import os
import threading
import time
from collections.abc import Mapping

import numpy as np

from capibara.monitoring.metrics_file.loggers import AGAIN, metrics_path
from capibara.monitoring.reading.attempts import Attempts
from capibara.monitoring.reading.parsing import Era, Record, Sample
from capibara.monitoring.reading.preview import Preview
from capibara.monitoring.reading.tables import Table, View
from capibara.storage import outputs

_MOST_EVENTS, _MOST_SAMPLES = 5_000, 20_000
_MOST_KINDS = 16
_MOST_FACTS = 1 << 16  # characters
OLDER_ROWS, _NEWEST_ROWS = 2_048, 2_048  # that are kept of each kind where memory is short
_RECENT = 64  # lines from which the usual time between two is taken
CHECKED_BYTES = 64  # before the position; if they have changed, the file is another one
_QUIET_S, _QUIET_TRAIN_S = 120.0, 900.0  # without a line, or a training line: the least that counts as a stall
_GONE_S = 24 * 3600.0
_STOPPED = {"finished": "finished", "interrupted": "interrupted"}


class Status(enum.StrEnum):
    """What a run is doing.

    WAITING: nothing is logged yet. STALLED: it logs nothing for too long. FAILED: for a day, without an end.
    """

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    STOPPED_EARLY = "stopped_early"
    STALLED = "stalled"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True)
class Limits:
    """When a silent run counts as stalled.

    Attributes:
      quiet_s, quiet_train_s: seconds without any line, or without a training line; at least.
    """

    quiet_s: float = _QUIET_S
    quiet_train_s: float = _QUIET_TRAIN_S


class Run:
    """A run folder; one thread adds what is read, others look at it.

    Args:
      folder: the run folder, absolute, or an address.
      name: for viewers: the path below the folder that was named on the command line.
    """

    def __init__(self, folder: str, name: str):
        self.folder, self.name = folder, name
        self.id = hashlib.sha256(folder.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        self.path = metrics_path(folder)
        self.lock = threading.Lock()
        self.wanted_s = 0.0  # when a viewer last asked for it, by time.monotonic
        self.fault: str | None = None  # why the file cannot be read
        self.is_new = True  # its file was not looked at yet
        self.version = self.epoch = 0  # count what was added, and how often earlier points became void
        self.clear()

    def clear(self) -> None:
        """Forgets what was read: the file is another one, or memory is short."""
        self.position, self.size, self.tail = 0, 0, b""
        self.is_coarse = False  # rows are missing: the file is not read yet, or memory was short
        self.is_unread = False  # rows are missing that were never read
        self.share_read = 1.0  # of the file
        self.whole_bytes = 0  # of memory, if no rows were missing; 0: unknown
        self.kinds = set[str]()
        self.attempts = Attempts()
        self.tables: dict[str, Table] = {}
        self.events = collections.deque[Record](maxlen=_MOST_EVENTS)
        self.samples = dict[tuple[int, str], Sample]()
        self.start: Record = {}
        self.facts: Record = {}
        self.began_s: float | None = None
        self.end: Record | None = None
        self._goodput: tuple[int, dict[str, float]] = (-1, {})
        self.version += 1
        self.epoch += 1

    @property
    def is_loading(self) -> bool:
        """Whether there is more to read."""
        return self.is_new or self.position < self.size or self.is_unread

    def adopt(self, other: Run) -> None:
        """Takes over what another object has read of the same file."""
        with self.lock:
            retained = {"folder", "name", "id", "path", "lock", "wanted_s", "is_new", "version", "epoch"}
            vars(self).update((name, value) for name, value in vars(other).items() if name not in retained)
            self.version += 1
            self.epoch += 1

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that its tables take."""
        return sum(table.held_bytes for table in self.tables.values())

    def moved(self, position: int, content: bytes) -> None:
        """Notes up to where the file has been read, and what is there."""
        self.position, self.tail = position, content[-CHECKED_BYTES:]

    def show(self, preview: Preview) -> None:
        """Shows some lines of a file that is still to be read, and follows it from its end."""
        self.apply(preview.eras)
        self.moved(preview.end, preview.tail)
        self.is_coarse = self.is_unread = True
        self.share_read = 0.0

    def forget_rows(self) -> None:
        """Keeps few of the older rows; all are read again when they are next looked at. New lines are still followed."""
        if all(len(table) <= OLDER_ROWS + _NEWEST_ROWS for table in self.tables.values()):
            return
        with self.lock:
            self.whole_bytes = self.held_bytes
            train = self.view("train")
            for table in self.tables.values():
                table.coarsen(OLDER_ROWS, _NEWEST_ROWS)
            self.attempts.forget_rows(train, len(self.view("train")))
            self.is_coarse = True
            self.version += 1
            self.epoch += 1

    def check_own(self) -> None:
        """Raises UserError if its file is a link out of its folder: in a folder of others it may lead to any file."""
        outputs.path_in(self.folder, os.path.basename(self.path))

    def apply(self, eras: list[Era], to_come: float = 0.0) -> None:
        """Adds what a range of the file holds; `to_come`: how many times as much is still to be read."""
        with self.lock:
            for era in eras:
                if era.again is not None:
                    self._again(era.again)
                self._add(era, to_come)
            self.version += 1

    def _again(self, again: Record) -> None:
        """A start, or a roll-back: drops what later steps had logged."""
        step = again["step"]
        self.attempts.close(again, self.view("train"))
        for table in self.tables.values():
            before = len(table)
            table.truncate(step)
            self.epoch += len(table) < before
        self.events = collections.deque(
            (event for event in self.events if event["step"] <= step or event.get("event") in AGAIN),
            maxlen=_MOST_EVENTS,
        )
        if any(key[0] > step for key in self.samples):
            self.samples = {key: sample for key, sample in self.samples.items() if key[0] <= step}
        self.events.append(_small(again))
        self.kinds.add("event")
        self.end = None
        if again["event"] == "start":
            self.start = _small(again)
            self.began_s = _time(again) if self.began_s is None else self.began_s

    def _add(self, era: Era, to_come: float) -> None:
        for kind, rows in era.rows.items():
            if kind not in self.tables and len(self.tables) >= _MOST_KINDS:
                continue
            self.tables.setdefault(kind, Table()).append(rows, to_come)
            self.kinds.add(kind)
        for event in era.events:
            self.events.append(_small(event))
            self.end = event if event.get("event") == "end" else self.end
            facts = event.get("facts")
            self.facts = facts if isinstance(facts, dict) and len(str(facts)) < _MOST_FACTS else self.facts
            self.kinds.add("event")
        for sample in era.samples:
            self.samples.pop((sample.step, sample.prompt), None)
            self.samples[sample.step, sample.prompt] = sample
            self.kinds.add("sample")
        while len(self.samples) > _MOST_SAMPLES:
            del self.samples[next(iter(self.samples))]
        self.attempts.add(era)

    def view(self, kind: str) -> View:
        """The rows of a kind as they are now."""
        table = self.tables.get(kind)
        return Table().view() if table is None else table.view()

    def views(self) -> Mapping[str, View]:
        """The rows of all kinds at one moment."""
        with self.lock:
            return {kind: table.view() for kind, table in self.tables.items()}

    def goodput(self) -> dict[str, float]:
        """Seconds by category, and their "total"; empty: the run has not started, or its file is not read yet."""
        if self.is_unread:
            return {}
        with self.lock:
            if self._goodput[0] != self.version:
                self._goodput = self.version, self.attempts.account(self.view("train"))
            return self._goodput[1]

    def newest_s(self, kind: str | None = None) -> float | None:
        """When the newest line was written, of one kind or of any; None: there is none."""
        views = [self.view(kind)] if kind is not None else [table.view() for table in self.tables.values()]
        times = [float(view.times[-1]) for view in views if len(view) and math.isfinite(view.times[-1])]
        if kind is None:
            times += [result for event in list(self.events)[-1:] if (result := _time(event)) is not None]
        return max(times, default=None)

    def status(self, limits: Limits, now_s: float | None = None) -> Status:
        """What the run is doing, as far as its file tells."""
        now_s = time.time() if now_s is None else now_s
        if not self.start and not self.tables:
            return Status.WAITING
        if self.end is not None:
            reason = str(self.end.get("reason"))
            return Status(_STOPPED.get(reason, Status.STOPPED_EARLY))
        newest_s = self.newest_s()
        if newest_s is None:
            return Status.WAITING
        quiet_s = now_s - newest_s
        if quiet_s > _GONE_S:
            return Status.FAILED
        if quiet_s > max(limits.quiet_s, 5 * self._usual_s(None)):
            return Status.STALLED
        trained_s = self.newest_s("train")
        if trained_s is not None and now_s - trained_s > max(limits.quiet_train_s, 20 * self._usual_s("train")):
            return Status.STALLED
        return Status.RUNNING

    def _usual_s(self, kind: str | None) -> float:
        """The median time between two lines of a kind; of any: the shortest of the kinds."""
        kinds = [kind] if kind is not None else list(self.tables)
        result = []
        for item in kinds:
            times = self.view(item).times[-_RECENT:]
            steps = np.diff(times[np.isfinite(times)])
            if len(steps):
                result.append(float(np.median(steps)))
        return max(0.0, min(result, default=0.0))

    @property
    def step(self) -> int | None:
        """The last step that was logged."""
        steps = [int(view.steps[-1]) for view in (self.view("train"), self.view("eval")) if len(view)]
        return max(steps, default=self.start.get("step"))


def start_value(run: Run, name: str) -> float | None:
    """A number that the run's last start recorded, such as total_steps."""
    value = run.start.get(name)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return value if is_number else None


def _small(event: Record) -> Record:
    """An event without what is large: facts and lists are read from the file when they are looked at."""
    retained = {
        key: value for key, value in list(event.items())[:64] if value is None or isinstance(value, (str, int, float))
    }
    return {key: value[:500] if isinstance(value, str) else value for key, value in retained.items()}


def _time(record: Record) -> float | None:
    value = record.get("time")
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def is_run_folder(names: set[str]) -> bool:
    """Whether a folder with these files and folders is a run's."""
    return "metrics.jsonl" in names or {"config.gin", "manifest.json"} <= names


def display_name(folder: str, root: str) -> str:
    """The name of a run below a root; the root's own name for itself."""
    inner = folder[len(root) :].strip("/") if folder.startswith(root) else folder
    return inner or os.path.basename(root.rstrip("/")) or root
