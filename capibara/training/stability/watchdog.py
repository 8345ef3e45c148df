"""The watchdog: ends a run that hangs (because of another process, a driver, a file system) and prints where."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import faulthandler
import os
import stat
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.multihost import peers
from capibara.multihost.exits import EXIT_HUNG

_WINDOW = 64  # step times of which the median is taken
_JOIN_S = 5.0  # wait for the watchdog's thread at the end
_FEWEST = 5  # steps before the usual step time is known
_LOOKS = 10  # checks within the shortest time limit
_BEAT_S = 1.0  # the longest time between two checks
_AT_LEAST_S, _AT_LEAST_LAUNCHED_S = 300.0, 60.0
_BEAT = "CAPIBARA_BEAT"  # "FD:PID": a pipe for heartbeats to the launcher, process PID


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Watch:
    """Time limits after which a run counts as hung; None: no limit.

    Attributes:
      factor: a step hangs if it takes so many times the median of the last 64 steps; None: the watchdog is off.
      at_least_s: and at least so many seconds; None: 300, or 60 if `launch` restarts the run.
      start_s: seconds for compiling, for restoring, for each of the first steps, whose median is not known yet, and for
        each part of work before the first step, such as a batch of a reference pass.
      evaluation_s: seconds for each batch of an evaluation, each sample, and each part of a rollout.
      save_s: seconds for which a save may block the run.
    """

    factor: float | None = 20.0
    at_least_s: float | None = None
    start_s: float | None = 3600.0
    evaluation_s: float | None = 1800.0
    save_s: float | None = 3600.0

    def __post_init__(self) -> None:
        if self.factor is not None and self.factor <= 1:
            raise UserError(f"Watch.factor is {self.factor}, must be above 1, or None for no watchdog")
        for name in ("at_least_s", "start_s", "evaluation_s", "save_s"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise UserError(f"Watch.{name} is {value}, must be above 0, or None")


class _Phase(NamedTuple):
    """Work outside of steps, and the field of Watch with its limit."""

    name: str
    limit: str


_START = _Phase("the start", "start_s")


class Watchdog:
    """Within `with`, a thread ends the process with EXIT_HUNG if the run hangs, after printing all stacks to stderr.

    From the first step on the thread also sends heartbeats to the launcher, if there is one; they stop if another thread
    never releases the GIL. Time in which the whole process was stopped does not count.

    Args:
      watch: the time limits.
      every: steps between two waits for the devices; only these waits are timed.
    """

    def __init__(self, watch: Watch, every: int = 1):
        self._watch, self._every = watch, every
        self._launcher, self._speaks = _launcher(), False
        default_s = _AT_LEAST_S if self._launcher is None else _AT_LEAST_LAUNCHED_S
        self._at_least_s = default_s if watch.at_least_s is None else watch.at_least_s
        self._lost_s = 0.0  # time in which this process was stopped
        self._times: collections.deque[float] = collections.deque(maxlen=_WINDOW)
        self._phase: _Phase | None = _START  # None: steps
        self._since_s = self._now_s()  # when the current steps, or the current part of the phase, began
        self._timed = False  # whether no other work interrupted the current steps
        self._steps = 0
        self._last_step: int | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="capibara-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self._watch.factor is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        if self._launcher is not None:
            _tell(self._launcher, b"-")

    def beat(self, step: int) -> None:
        """Call it after `step` was dispatched; every `every` steps, after the devices have completed it."""
        self._phase, self._speaks = None, True
        self._steps, self._last_step = self._steps + 1, step
        if self._steps % self._every == 0:
            now_s = self._now_s()
            if self._timed:
                self._times.append(now_s - self._since_s)
            self._since_s, self._timed = now_s, True

    def advance(self) -> None:
        """Call it after a part of long work, such as a batch of an evaluation."""
        if self._phase is not None:
            self._since_s = self._now_s()

    @contextlib.contextmanager
    def allowing(self, action: str, limit: str) -> Iterator[None]:
        """A context for work outside of steps.

        Args:
          action: its name in the error.
          limit: the field of Watch that limits each part of it.
        """
        with self._at(action, limit):
            yield
        self._since_s, self._timed, self._steps = self._now_s(), False, 0

    @contextlib.contextmanager
    def left_out(self, action: str, limit: str) -> Iterator[None]:
        """As `allowing`, between two steps: its time is excluded from the step time."""
        since_s, began_s = self._since_s, self._now_s()
        with self._at(action, limit):
            yield
        self._since_s = since_s + self._now_s() - began_s

    def ending(self) -> None:
        """Call it after the last step, before the wait for the last save."""
        self._phase, self._since_s = _Phase("the last save", "save_s"), self._now_s()

    @contextlib.contextmanager
    def _at(self, action: str, limit: str) -> Iterator[None]:
        before, self._since_s = self._phase, self._now_s()
        self._phase = _Phase(action, limit)
        yield
        self._since_s = self._now_s()  # before the phase: the new limit may be shorter
        self._phase = before

    @property
    def limit_s(self) -> float | None:
        """Seconds after which the current step or work counts as hung; None: never."""
        if self._watch.factor is None:
            return None
        if (phase := self._phase_at_hand) is not None:
            return getattr(self._watch, phase.limit)
        return max(self._at_least_s, self._watch.factor * statistics.median(self._times))

    @property
    def _phase_at_hand(self) -> _Phase | None:
        """The current work; None: steps whose usual time is known."""
        return self._phase or (_START if len(self._times) < _FEWEST else None)

    def _look(self) -> None:
        watch, looked_s = self._watch, time.monotonic()
        limits_s = [self._at_least_s, watch.start_s, watch.evaluation_s, watch.save_s]
        pause_s = min([_BEAT_S, *(limit_s / _LOOKS for limit_s in limits_s if limit_s)])
        while not self._ended.wait(pause_s):
            self._lost_s += max(0.0, time.monotonic() - looked_s - 2 * pause_s)
            looked_s = time.monotonic()
            if self._launcher is not None and self._speaks:
                _tell(self._launcher, b".")
            # Read the limit before the time: work that begins in between may have a shorter limit.
            limit_s, now_s = self.limit_s, self._now_s()
            if limit_s is not None and now_s - self._since_s > limit_s:
                self._end(now_s - self._since_s)

    def _now_s(self) -> float:
        return time.monotonic() - self._lost_s

    def _end(self, waited_s: float) -> None:
        after = "" if self._last_step is None else f" after step {self._last_step}"
        phase, ends = self._phase_at_hand, "this run hangs and ends; start it again to resume"
        if phase is None:
            usual_s = statistics.median(self._times)
            result = (
                f"the devices have completed no step for {waited_s:.0f} s{after}, {usual_s:.2g} s are usual: {ends} "
                "(Watch.factor, Watch.at_least_s)"
            )
        else:
            result = f"{phase.name}{after} has made no progress for {waited_s:.0f} s: {ends} (Watch.{phase.limit})"
        print(f"error: {result}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        peers.report(EXIT_HUNG, result)
        peers.exit_process(EXIT_HUNG)


def _launcher() -> int | None:
    """The pipe to the launcher; None: this process was not started by one."""
    pipe, _, pid = os.environ.get(_BEAT, "").partition(":")
    if pipe.isdigit() and pid == str(os.getppid()):  # a worker's children inherit the variable, but not the pipe
        with contextlib.suppress(OSError):
            if stat.S_ISFIFO(os.fstat(int(pipe)).st_mode):
                os.set_inheritable(int(pipe), False)
                return int(pipe)
    return None


def _tell(pipe: int, word: bytes) -> None:
    """Sends a heartbeat ".", or "-" before the last save, after which no more follow."""
    with contextlib.suppress(OSError):  # the pipe is full or closed: nobody reads it
        os.write(pipe, word)
