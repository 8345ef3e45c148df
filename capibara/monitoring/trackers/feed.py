"""Feeds one tracker from metrics.jsonl: begins it, follows the file, and begins it again after a failure."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from capibara.checkpoints import run_manifest
from capibara.core.types import UserError
from capibara.monitoring.metrics_file.loggers import AGAIN, metrics_path
from capibara.monitoring.metrics_file.redaction import encodable, redact, redact_json
from capibara.monitoring.trackers import lineage, lines, state
from capibara.monitoring.trackers.lines import Line, Position, Tail
from capibara.monitoring.trackers.pictures import Pictures
from capibara.monitoring.trackers.skipping import Skipping
from capibara.monitoring.trackers.state import TrackerState
from capibara.monitoring.trackers.tracker import Moment, TrackedRun, Tracker
from capibara.storage import stores

LOCAL_POLL_S, _BUCKET_POLL_S = 1.0, 15.0
RETRY_S, _LONGEST_RETRY_S = 1.0, 300.0
_LONGEST_ERROR = 300
_DEEPEST, _MOST_METRICS, _LONGEST_NAME = 4, 10_000, 500  # of the metrics of a line
_SPENT = "spent"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hooks:
    """What a feed reports: each is called with a line of text, from the feed's thread.

    Attributes:
      failed: the first failure since the start, or since it last worked.
      works: where the run is seen, or that the tracker works again.
      say: a line of the tracker's own.
      fault: an exception to be kept in the log.
    """

    failed: Callable[[str], None]
    works: Callable[[str], None]
    say: Callable[[str], None]
    fault: Callable[[BaseException], None]


class Feed:
    """One tracker of a run, in a thread of its own.

    Args:
      tracker: as configured; each session uses a copy.
      label: its name, of no other tracker of the run.
      model_dir: the run folder.
      scratch: a local folder for the files of the tracker's client.
      hooks: what is reported.

    Attributes:
      ending: set: the run has ended, and the feed ends when it has sent everything, or fails.
      busy_since: since when the tracker has been at work on one call; None: it waits for lines.
    """

    def __init__(self, tracker: Tracker, label: str, model_dir: str, scratch: str, hooks: Hooks):
        self.label, self.ending = label, threading.Event()
        self.busy_since: float | None = None
        self._tracker, self._model_dir, self._scratch, self._hooks = tracker, model_dir, scratch, hooks
        self._path = metrics_path(model_dir)
        self._state = state.read(model_dir, label)
        if not lines.is_within(self._path, self._state.position):
            self._state = dataclasses.replace(self._state, position=Position())
        self._poll_s = LOCAL_POLL_S if stores.of(model_dir).appends else _BUCKET_POLL_S
        self._has_failed, self._has_said = False, False
        self._skipped: set[str] = set()  # what was said of it

    def run(self) -> bool:
        """Feeds the tracker until the run has ended; returns whether everything was sent."""
        wait_s = RETRY_S
        while True:
            begun_s, was_ending = time.monotonic(), self.ending.is_set()
            try:
                self._session()
                return True
            except (Exception, SystemExit) as error:  # a client may end "the program"
                self._fail(error)
                if isinstance(error, UserError) or was_ending:
                    return False
            if time.monotonic() - begun_s > _LONGEST_RETRY_S:  # it worked for a while
                wait_s = RETRY_S
            self.ending.wait(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_RETRY_S)

    def _fail(self, error: BaseException) -> None:
        self.busy_since = None
        self._hooks.fault(error)
        if not self._has_failed:
            self._has_failed = True
            text = " ".join(redact(str(error)).split())
            message = text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
            self._hooks.failed(message[:_LONGEST_ERROR])

    def _session(self) -> None:
        """One attempt: starts the tracker, sends what it has not got, and follows the run to its end."""
        tail = Tail(self._path, self._state.position)
        while (
            not (content := tail.read()) and not self.ending.is_set()
        ):  # a run that is set up; nothing is made for it yet
            self.ending.wait(self._poll_s)
        if not content and (self._state.is_finished or not tail.position.byte):
            return
        tracker = copy.copy(self._tracker)
        skipping = Skipping(tracker, self.label, self._hooks.say, self._skipped)
        session = _Session(skipping, self._model_dir, self._state.reason)
        run = self._run()
        self._begin()
        run_id = state.checked_id(self.label, tracker.start(run)) or self._state.run_id
        self._save(dataclasses.replace(self._state, run_id=run_id, url=tracker.url, is_finished=False))
        if content:
            session.begin(run, content[0])
        while True:
            is_last = self.ending.is_set()
            for line in content:
                self._begin()
                session.line(line)
            self._begin()
            if content:
                session.pictures.send(session.moment)
                if tracker.flush():
                    self._save(dataclasses.replace(self._state, position=tail.position, reason=session.reason))
            self.busy_since = None
            self._say_works()
            if is_last and not content:
                break
            if not content:
                self.ending.wait(self._poll_s)
            content = tail.read()
        self._begin()
        session.end()
        done = dataclasses.replace(self._state, position=tail.position, reason=session.reason, is_finished=True)
        self._save(done)
        self.busy_since = None

    def _begin(self) -> None:
        self.busy_since = time.monotonic()

    def _say_works(self) -> None:
        if self._has_failed:
            self._hooks.works(f"{self.label} works again")
        elif not self._has_said and self._state.url:
            self._hooks.works(f"{self.label}: {self._state.url}")
        self._has_said, self._has_failed = True, False

    def _save(self, tracker_state: TrackerState) -> None:
        if tracker_state != self._state:
            state.write(
                self._model_dir, self.label, tracker_state
            )  # first: a full disk must not make it count as written
            self._state = tracker_state

    def _run(self) -> TrackedRun:
        text, bound = state.configuration(self._model_dir)
        os.makedirs(self._scratch, exist_ok=True)
        return TrackedRun(
            name=encodable(os.path.basename(self._model_dir.rstrip("/"))) or "run",
            folder=self._model_dir,
            uid=state.uid(self._model_dir),
            run_id=self._state.run_id,
            config=redact_json(bound),
            config_text=redact(text),
            scratch=self._scratch,
            say=self._hooks.say,
        )


class _Session:
    """Calls a tracker's methods for the lines of metrics.jsonl."""

    def __init__(self, tracker: Tracker, model_dir: str, reason: str):
        self._tracker, self._model_dir, self.reason = tracker, model_dir, reason
        self.pictures = Pictures(tracker, model_dir)
        self.moment = Moment(0, 0.0, 0)
        self._lineage = ""

    def begin(self, run: TrackedRun, first: Line) -> None:
        record = first.record or {}
        self.moment = Moment(record.get("step", 0), float(record.get("time", time.time())), first.number)
        self._tracker.text(self.moment, run_manifest.CONFIG, run.config_text)
        for name, text in lineage.plans(self._model_dir):
            self._tracker.text(self.moment, name, redact(text))

    def line(self, line: Line) -> None:
        if line.is_void or (record := line.record) is None:
            return
        kind, step = record["kind"], record["step"]
        self.moment = moment = Moment(step, float(record.get("time", 0.0)), line.number)
        if kind in ("train", "eval", "system"):
            self._log(kind, {name: value for name, value in record.items() if name not in ("kind", "step", "time")})
        elif kind == "sample":
            prompt, text = str(record.get("prompt", "")), str(record.get("text", ""))
            self._tracker.text(moment, f"sample/{redact(prompt)}", redact(prompt + text))
        elif kind == "event":
            self._event(record)

    def _event(self, record: Mapping[str, object]) -> None:
        event = record.get("event")
        if event in AGAIN:
            self.reason = "crashed"
            if event == "roll_back" or record["step"]:
                self._tracker.roll_back(self.moment)
        if event == "start":
            self._tracker.facts(self.moment, {"run": redact_json(_values(record))})
        elif event == "facts" and isinstance(record.get("facts"), dict):
            self._tracker.facts(self.moment, redact_json(record["facts"]))
        elif event == _SPENT:
            self._log(_SPENT, {f"{name}_s": value for name, value in _values(record).items()})
        elif event == "checkpoint":
            self._send_lineage()
        elif event == "end":
            self.reason = str(record.get("reason"))

    def end(self) -> None:
        """Sends the last pictures and the lineage, and finishes."""
        self._send_lineage()
        self.pictures.send(self.moment, every_s=0.0)
        self._tracker.finish(self.reason)

    def _log(self, group: str, values: Mapping[str, object]) -> None:
        numbers = dict(itertools.islice(_numbers(group, values), _MOST_METRICS))
        if numbers:
            self._tracker.log(self.moment, numbers)
        if isinstance(warning := values.get("warning"), str):
            self._tracker.text(self.moment, "warning", redact(warning))

    def _send_lineage(self) -> None:
        try:
            result = lineage.of_run(self._model_dir)
        except Exception:  # whatever manifests of a run folder lead to: metrics are sent all the same
            return
        if result and result != self._lineage:
            self._lineage = result
            self._tracker.text(self.moment, lineage.NAME, redact(result))


def _values(record: Mapping[str, object]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in ("kind", "event", "step", "time")}


def _numbers(group: str, values: Mapping[str, object], depth: int = _DEEPEST) -> Iterator[tuple[str, float]]:
    """Finite numbers by name; those of several devices get the device's number as the last part."""
    for name, value in values.items():
        if isinstance(value, (dict, list)):
            inner = value if isinstance(value, dict) else {str(index): item for index, item in enumerate(value)}
            if depth:
                yield from _numbers(f"{group}/{name}", inner, depth - 1)
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            yield encodable(f"{group}/{name}")[:_LONGEST_NAME], float(value)
