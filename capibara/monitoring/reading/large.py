"""Reads large files with several processes, in parts of whole lines that are added in order."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import multiprocessing
import os
import time
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver

from capibara.core import limits
from capibara.core.types import TryAgain, UserError
from capibara.monitoring.reading import parsing
from capibara.monitoring.reading.parsing import LONGEST_LINE_BYTES, Era, Range
from capibara.monitoring.reading.run import CHECKED_BYTES, Run
from capibara.storage import stores

PART_BYTES = 24 << 20  # of a file, for one process
_NICER = 4  # than the server: what viewers ask for goes first
_LOOK_S = 0.02  # while processes read
_NEWS_SHARE = 0.1  # of a file: read since viewers last heard of it
_IDLE_S = 20.0  # after which these processes end
_FAULTS = (UserError, TryAgain, OSError, limits.Refused)
_Future = concurrent.futures.Future[list[Era]]


@dataclasses.dataclass(frozen=True)
class _File:
    """A large file that is being read.

    Attributes:
      target: what is read is added to: the run, or an object that replaces it when all has been read.
      jobs: the parts that are not added yet.
    """

    target: Run
    jobs: collections.deque[tuple[Range, _Future]]


class LargeFiles:
    """The large files that are being read, by the ids of their runs; belongs to one thread."""

    def __init__(self) -> None:
        self._files: dict[str, _File] = {}
        self._pool: concurrent.futures.ProcessPoolExecutor | None = None
        self._used_s = 0.0

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, run_id: object) -> bool:
        return run_id in self._files

    @property
    def has_room(self) -> bool:
        """Whether another file can be begun: the processes would soon have nothing to do."""
        return len(self._files) <= processes()

    def begin(self, run: Run, target: Run) -> None:
        """Begins to read a file from the target's position to its size.

        Args:
          run: the run.
          target: what is read is added to: the run, or an object that replaces it when all has been read.

        Raises:
          UserError, TryAgain, OSError: the file cannot be read.
        """
        begin, file = target.position, _File(target, collections.deque())
        store = stores.of(run.path)
        target.size = _last_end(run.path, target.size, begin)
        while begin < target.size:
            end = min(target.size, begin + PART_BYTES)
            end = target.size if end == target.size else _next_end(run.path, end, target.size)
            part = Range(run.path, begin, end)
            file.jobs.append((part, self._submit(part, is_local=store.has_local_paths)))
            begin = end
        if file.jobs:
            self._files[run.id] = file

    def collect(self, run: Run) -> bool:
        """Adds the parts that have been read, in order; returns whether the run has changed.

        Raises:
          UserError, TryAgain, OSError: the file cannot be read, and is no longer among those that are being read.
        """
        file, has_changed = self._files[run.id], False
        target = file.target
        self._used_s = time.monotonic()
        while file.jobs and file.jobs[0][1].done():
            part, future = file.jobs.popleft()
            try:
                eras = future.result()
                tail = stores.of(run.path).read_range(run.path, max(part.start, part.stop - CHECKED_BYTES), part.stop)
            except (BrokenProcessPool, concurrent.futures.CancelledError):
                self.end()
                file.jobs.appendleft((part, self._submit(part, is_local=False)))
                continue
            except _FAULTS:
                self.cancel(run)
                raise
            target.apply(eras, (target.size - part.stop) / (part.stop - part.start))
            target.moved(part.stop, tail)
            has_changed |= target is run
        if target is not run:
            has_changed |= _report(run, target.position / target.size)
        if file.jobs:
            return has_changed
        del self._files[run.id]
        if target is not run:
            run.adopt(target)
        return True

    def cancel(self, run: Run) -> None:
        """Reads no more of a run's file."""
        file = self._files.pop(run.id, None)
        for _, future in () if file is None else file.jobs:
            future.cancel()

    def wait(self) -> None:
        """Waits a moment for parts that can be added."""
        oldest = [file.jobs[0][1] for file in self._files.values()]
        concurrent.futures.wait(oldest, _LOOK_S, concurrent.futures.FIRST_COMPLETED)

    def rest(self) -> None:
        """Ends the processes if they have had nothing to do for a while."""
        if self._pool is not None and time.monotonic() - self._used_s > _IDLE_S:
            self.end()

    def end(self, *, waits: bool = False) -> None:
        """Ends the processes; `waits`: until they have ended."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=waits, cancel_futures=True)

    def _submit(self, part: Range, *, is_local: bool) -> _Future:
        """Passes a part to a process; one of a bucket is read here, where its connections are."""
        if is_local:
            try:
                return self._processes().submit(parsing.parse, part)
            except (BrokenProcessPool, RuntimeError):
                self.end()
        future: _Future = concurrent.futures.Future()
        try:
            future.set_result(parsing.parse(part))
        except _FAULTS as error:
            future.set_exception(error)
        return future

    def _processes(self) -> concurrent.futures.ProcessPoolExecutor:
        if self._pool is None:
            context = multiprocessing.get_context("forkserver")
            self._pool = concurrent.futures.ProcessPoolExecutor(
                processes(), mp_context=context, initializer=os.nice, initargs=(_NICER,)
            )
        self._used_s = time.monotonic()
        return self._pool


def _report(run: Run, share_read: float) -> bool:
    """Notes how much of a run's file has been read; returns whether that is news for viewers."""
    if not run.is_unread or share_read < run.share_read + _NEWS_SHARE:
        return False
    run.share_read = share_read
    run.version += 1
    return True


def processes() -> int:
    """How many processes read large files."""
    return max(1, min(4, len(os.sched_getaffinity(0))))


def prepare() -> None:
    """Starts the process from which those that read large files are made; quick, and done once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([parsing.__name__, "pyarrow.csv"])
    forkserver.ensure_running()


def _last_end(path: str, at: int, lowest: int) -> int:
    """The end of the last line that ends at or before a position."""
    store, lowest = stores.of(path), max(lowest, at - LONGEST_LINE_BYTES)
    while at > lowest:
        begin = max(lowest, at - (1 << 16))
        result = store.read_range(path, begin, at).rfind(b"\n")
        if result >= 0:
            return begin + result + 1
        at = begin
    return at


def _next_end(path: str, at: int, highest: int) -> int:
    """The end of the first line that ends at or after a position."""
    store = stores.of(path)
    while at < highest:
        end = min(highest, at + (1 << 16))
        result = store.read_range(path, at, end).find(b"\n")
        if result >= 0:
            return at + result + 1
        at = end
    return highest
