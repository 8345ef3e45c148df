"""Follows run folders in a thread: finds new ones, reads what was appended, and reads large files with several processes.

Of a large file some lines are shown first. It is then read in full, and again where its rows were dropped from memory; the
runs that viewers look at come first.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence

from capibara.core import limits
from capibara.core.types import TryAgain, UserError
from capibara.monitoring.reading import folders, memory, parsing
from capibara.monitoring.reading.large import LargeFiles
from capibara.monitoring.reading.preview import preview
from capibara.monitoring.reading.run import Run
from capibara.storage import stores

SMALL_BYTES = 4 << 20  # appended since the last look: read at once, without other processes
LOOK_S = 0.25  # after which a look at many new runs ends, so that viewers see the first ones
SETTLE_S = 0.5  # after lines of a large file are shown: what a page needs to draw them is not to wait for other lines
PAUSE_S = 30.0  # after a fault of a bucket
_FAULTS = (UserError, TryAgain, OSError, limits.Refused)


@dataclasses.dataclass
class Change:
    """What a look at the run folders has found.

    Attributes:
      added, removed: ids of runs.
      updated: ids of runs with new lines.
      reloaded: ids of runs whose earlier points are void.
    """

    added: list[str] = dataclasses.field(default_factory=list)
    removed: list[str] = dataclasses.field(default_factory=list)
    updated: list[str] = dataclasses.field(default_factory=list)
    reloaded: list[str] = dataclasses.field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.updated or self.reloaded)


class Reader:
    """Follows the runs below some folders of one store.

    Args:
      roots: folders or addresses.
      changed: called in the reader's thread after each look that found something.
      poll_s, scan_s: seconds between two looks at the files, and between two searches for new runs.
      most_bytes: memory for rows; of the runs that were not looked at for longest few rows are kept, and the others
        are read again when they are looked at, if there is memory for them.
    """

    def __init__(
        self,
        roots: Sequence[str],
        changed: Callable[[Change], None],
        *,
        poll_s: float = 1.0,
        scan_s: float = 3.0,
        most_bytes: int = 1 << 30,
    ):
        self.runs: dict[str, Run] = {}
        self.fault: str | None = None
        self._roots, self._changed = list(roots), changed
        self._poll_s, self._scan_s, self._most_bytes = poll_s, scan_s, most_bytes
        self._large = LargeFiles()
        self._scanned_s = self._shown_s = -math.inf
        self._paused: dict[str, float] = {}
        self._epochs: dict[str, int] = {}
        self._wake, self._is_stopped = threading.Event(), False
        self._thread = threading.Thread(target=self._work, name="reader", daemon=True)

    def start(self) -> None:
        """Begins to read."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and its processes."""
        self._is_stopped = True
        self._wake.set()
        self._thread.join(5.0)
        self._large.end(waits=True)

    def run(self, run_id: str) -> Run | None:
        """A run that a viewer looks at; one that was dropped from memory is read again."""
        run = self.runs.get(run_id)
        if run is not None:
            run.wanted_s = time.monotonic()
            if run.is_coarse:
                self._wake.set()
        return run

    def look(self) -> Change:
        """Searches for runs if it is time, and reads what is new; called by the thread."""
        change = Change()
        now_s = time.monotonic()
        self._read_whole(now_s)
        if now_s - self._scanned_s >= self._scan_s:
            self._scan(change)
            self._scanned_s = time.monotonic()
        for run in sorted(self.runs.values(), key=lambda run: (run.is_new, -run.wanted_s)):
            if run.is_new and time.monotonic() - now_s > LOOK_S:
                break
            try:
                if run.id in self._large:
                    self._collect(run, change)
                elif self._paused.get(run.id, 0.0) <= now_s:
                    self._follow(run, change)
            except Exception as error:  # lines that make no sense in one run must not end the reading of all others
                logging.getLogger(__name__).exception("%s could not be read", run.path)
                self._large.cancel(run)
                self._failed(run, error)
            run.is_new = False
        for run_id in change.updated:
            run = self.runs[run_id]
            if self._epochs.get(run_id, run.epoch) != run.epoch:
                change.reloaded.append(run_id)
            self._epochs[run_id] = run.epoch
        memory.save([run for run in self.runs.values() if run.id not in self._large], self._most_bytes)
        return change

    def _work(self) -> None:
        while not self._is_stopped:
            try:
                change = self.look()
                if change:
                    self._changed(change)
            except Exception:  # one run folder must not end the reading of all others
                logging.getLogger(__name__).exception("the run folders could not be looked at")
                self._wake.wait(PAUSE_S)
            if self._large:
                self._large.wait()
            elif not (any(run.is_new for run in self.runs.values()) or self._waiting(time.monotonic())):
                self._large.rest()
                self._wake.wait(self._poll_s)
                self._wake.clear()

    def _scan(self, change: Change) -> None:
        try:
            result = folders.runs_below(self._roots)
        except _FAULTS as error:
            self.fault = limits.cause(error)
            return
        self.fault = None
        known = {run.folder for run in self.runs.values()}
        for folder, name in result.items():
            if folder not in known:
                run = Run(folder, name)
                self.runs[run.id] = run
                change.added.append(run.id)
        for run in [run for run in self.runs.values() if run.folder not in result]:
            del self.runs[run.id]
            self._forget(run)
            change.removed.append(run.id)

    def _forget(self, run: Run) -> None:
        self._large.cancel(run)
        self._paused.pop(run.id, None)
        self._epochs.pop(run.id, None)

    def _follow(self, run: Run, change: Change) -> None:
        """Reads what was appended since the last look."""
        try:
            if not self._has_grown(run):
                return
            if run.size - run.position > SMALL_BYTES:
                self._begin(run)
                change.updated.append(run.id)
                return
            content = stores.of(run.path).read_range(run.path, run.position, run.size)
            end = content.rfind(b"\n") + 1
            if end:
                run.apply(parsing.parse_text(content[:end], run.position))
                run.moved(run.position + end, content[:end])
                change.updated.append(run.id)
            run.size = run.position  # the rest is no whole line yet
            run.fault = None
        except FileNotFoundError:
            run.size = run.position
        except _FAULTS as error:
            self._failed(run, error)

    def _failed(self, run: Run, error: BaseException) -> None:
        run.fault, run.size = limits.cause(error), run.position
        self._paused[run.id] = time.monotonic() + PAUSE_S

    def _has_grown(self, run: Run) -> bool:
        """Whether there is something to read; a file that is another one is read from its beginning."""
        run.check_own()
        store = stores.of(run.path)
        size = _size(run.path)
        if size == run.position:
            return False
        begin = run.position - len(run.tail)
        if size < run.position or run.tail and store.read_range(run.path, begin, run.position) != run.tail:
            run.clear()
        run.size = size
        return size > run.position

    def _begin(self, run: Run) -> None:
        """Begins to read a large file: shows some of its lines, or adds its further ones one part after the other."""
        shown = preview(run.path, run.size) if not run.position else None
        if shown is None or not shown.end:
            self._large.begin(run, run)
            return
        run.show(shown)
        self._shown_s = time.monotonic()
        run.size, run.fault = run.position, None

    def _waiting(self, now_s: float) -> list[Run]:
        """The runs of which rows are missing and are to be read now, those that were looked at last first."""
        if now_s < self._shown_s + SETTLE_S:
            return []
        result = [run for run in self.runs.values() if run.is_coarse and run.id not in self._large]
        result = [run for run in result if run.is_unread or memory.is_looked_at(run)]
        result = sorted(result, key=lambda run: -run.wanted_s)
        result = [run for run in result if self._paused.get(run.id, 0.0) <= now_s]
        return [run for run in result if run.is_unread or memory.fits(run, self.runs, self._large, self._most_bytes)]

    def _read_whole(self, now_s: float) -> None:
        """Begins to read runs of which rows are missing."""
        for run in self._waiting(now_s) if self._large.has_room else []:
            target = Run(run.folder, run.name)
            target.size = run.position
            try:
                self._large.begin(run, target)
            except _FAULTS as error:
                self._failed(run, error)
            if run.id not in self._large:  # it has become another file: it is looked at again later
                self._paused[run.id] = now_s + PAUSE_S
            if not self._large.has_room:
                break

    def _collect(self, run: Run, change: Change) -> None:
        """Adds what has been read of a large file."""
        try:
            if self._large.collect(run):
                change.updated.append(run.id)
        except _FAULTS as error:
            self._failed(run, error)


def _size(path: str) -> int:
    """The size of a file in bytes; raises OSError if it does not exist."""
    store = stores.of(path)
    if store.has_local_paths:
        return store.size(path)
    result = store.matching(path)  # asks the bucket anew
    if not result:
        raise FileNotFoundError(path)
    return result[0].size
